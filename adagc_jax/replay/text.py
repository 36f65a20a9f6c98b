"""What all logs of lines of text share: opening them, and rows that become blocks."""

import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from adagc_jax.replay.schema import Block, Schema

ROWS = 1024


class Lines(Iterator[str]):
    """Lines of a text file, compressed or not; what is no text says where.

    Attributes:
      number: Of the line given last, from 1 on.
      cut_off: Whether that line lacks its end, as the last one may.
    """

    def __init__(self, path: Path):
        self.path, self.number, self.cut_off = path, 0, False
        self._file = _open_text(path)
        self._lines = iter(self._file)

    def __next__(self) -> str:
        try:
            line = next(self._lines)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.path} line {self.number + 1} or soon after: expected UTF-8 "
                f"text, got the byte {error.object[error.start]:#04x}."
            ) from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(
                f"{self.path} after line {self.number}: the compressed file is cut off "
                f"or damaged ({error}); decompress what there is, and read that."
            ) from error
        self.number += 1
        self.cut_off = not line.endswith(("\n", "\r"))
        return line

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _open_text(path: Path) -> IO[str]:
    # The mark that some editors put at the start of a file is no part of its text.
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return open(path, encoding="utf-8-sig", newline="")


class RowCollector:
    """Collects rows with the same keys into blocks, and only the keys that matter.

    Attributes:
      keys: The keys that matter in the row added last.
    """

    def __init__(self, source: str, schema: Schema):
        self.source, self.schema = source, schema
        self.keys: tuple[str, ...] = ()
        self._known: Any = None
        self._where: list[str] = []
        self._values: list[tuple[Any, ...]] = []

    def add(self, where: str, row: dict[str, Any]) -> Iterator[Block]:
        """Takes a row in; yields the block that it has ended, if any."""
        if row.keys() != self._known:
            yield from self.rest()
            self._known = row.keys()
            self.keys = tuple(self.schema.places(row))
        yield from self.add_values(where, tuple(row[key] for key in self.keys))

    def add_values(self, where: str, values: tuple[Any, ...]) -> Iterator[Block]:
        """Takes in the values of a row with the same keys as the one before."""
        self._where.append(where)
        self._values.append(values)
        if len(self._values) == ROWS:
            yield from self.rest()

    def rest(self) -> Iterator[Block]:
        """Yields the block of the rows that are left, if any."""
        if self._values:
            where, values, self._where, self._values = self._where, self._values, [], []
            yield block_of_rows(self.source, where, self.keys, values)


def blocks_of_rows(
    source: str, rows: Iterable[tuple[str, dict[str, Any]]], schema: Schema
) -> Iterator[Block]:
    """Blocks out of rows, each with its place."""
    collector = RowCollector(source, schema)
    for where, row in rows:
        yield from collector.add(where, row)
    yield from collector.rest()


def block_of_rows(
    source: str,
    where: Sequence[str],
    keys: tuple[str, ...],
    rows: Sequence[tuple[Any, ...]],
) -> Block:
    """A block out of rows of numbers, text that is a number, or None."""
    # numpy would take null for NaN, and a missing norm is not a NaN.
    if any(None in row for row in rows):
        present = np.array([[value is not None for value in row] for row in rows])
    else:
        present = np.ones((len(rows), len(keys)), bool)
    try:
        values = np.array(rows, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise _not_a_number(source, where, keys, rows) from error
    return Block(tuple(where), keys, values.reshape(present.shape), present)


def _not_a_number(
    source: str,
    where: Sequence[str],
    keys: tuple[str, ...],
    rows: Sequence[tuple[Any, ...]],
) -> ValueError:
    for place, row in zip(where, rows, strict=True):
        for key, value in zip(keys, row, strict=True):
            try:
                float(0.0 if value is None else value)
            except (TypeError, ValueError):
                return ValueError(
                    f"{source} {place}: expected a number under {key!r}, got "
                    f"{value!r:.80}."
                )
    return ValueError(f"{source} {where[0]}: expected a number under every key.")
