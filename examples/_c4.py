"""C4 as bytes: a stream of documents, packed one behind the other.

`c4` streams the corpus from the hub; a folder in its layout (shards of JSON lines with
a text each, `en/c4-train.00000-of-01024.json.gz`) is read from the disk.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from _cli import BadOption, check_installed

# Not a byte of UTF-8 text: where one document ends and the next begins.
_BETWEEN = b"\x00"


def shards(folder: Path) -> list[Path]:
    """The training shards of a local copy, in order; none if it is none."""
    return sorted(folder.rglob("c4-train.*.json.gz"))


def read_shards(paths: Iterable[Path]) -> Iterator[str]:
    """The documents of local shards.

    Raises:
      BadOption: If a shard is no gzip file of JSON lines with a text each.
    """
    for path in paths:
        try:
            with gzip.open(path, "rt", encoding="utf-8") as lines:
                for line in lines:
                    yield str(json.loads(line)["text"])
        except (
            EOFError,
            OSError,
            ValueError,
            KeyError,
            TypeError,
            zlib.error,
        ) as error:
            raise BadOption(
                f"--data: {path} is no gzip file of JSON lines with a text each "
                f"({type(error).__name__}: {error})"
            ) from error


def stream_c4() -> Iterator[str]:
    """The documents of C4, over the network.

    Raises:
      BadOption: If `datasets` is not installed.
    """
    also = "datasets (a --data FOLDER of c4-train.*.json.gz shards does not)"
    check_installed("--data c4", "datasets", also)
    import datasets  # pyright: ignore[reportMissingImports]

    rows: Iterable[Any] = datasets.load_dataset(
        "allenai/c4", "en", split="train", streaming=True
    )
    return (row["text"] for row in rows)


def pack(texts: Iterable[str], limit: int, every: int) -> tuple[int, bytes, bytes]:
    """Documents up to `limit` bytes: how many, for training, and held out.

    Args:
      texts: The documents.
      limit: Bytes after which no further one is read.
      every: One of so many is held out.
    """
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    count = size = 0
    for text in texts:
        packed = text.encode() + _BETWEEN
        parts[count % every == 0].append(packed)
        count, size = count + 1, size + len(packed)
        if size >= limit:
            break
    return count, b"".join(parts[0]), b"".join(parts[1])
