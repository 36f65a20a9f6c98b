"""The corpus (by default Python's own library), batches, and corrupted batches.

A batch is a pure function of (seed, step): whoever asks for step 120 gets the same
bytes, so every clipper is trained on exactly the same data.
"""

import argparse
import dataclasses
import glob
import hashlib
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import _c4
import numpy as np
from _cli import BadOption

Batch = tuple[np.ndarray, np.ndarray]

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_VALIDATION_EVERY = 20


@dataclasses.dataclass(frozen=True)
class Burst:
    """Consecutive corrupted batches of one kind, from `step` on."""

    kind: str
    step: int

    def __str__(self) -> str:
        return f"{self.kind}@{self.step}"


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Source text as bytes, and what identifies it."""

    name: str
    files: int
    sha256: str
    train: np.ndarray
    validation: np.ndarray

    def __str__(self) -> str:
        size = (self.train.size + self.validation.size) / 1e6
        held_out = self.validation.size / 1e6
        return (
            f"{self.name}: {self.files} files, {size:.1f} MB, {held_out:.1f} MB of "
            f"them held out, sha256 {self.sha256[:16]}"
        )

    def check(self, length: int) -> None:
        """Raises BadOption if a sequence of that length cannot be cut from it."""
        if min(self.train.size, self.validation.size) <= length:
            raise BadOption(
                f"--data {self.name} has {self.train.size} bytes to train on and "
                f"{self.validation.size} held out, and each part needs {length + 1} "
                f"for --length {length}: give more or longer texts"
            )


def load_corpus(source: str = "stdlib", megabytes: int = 50) -> Corpus:
    """Reads text, and holds a part of it out for validation.

    Args:
      source: "stdlib", the .py files of Python's own library; "c4", a stream from the
        hub; a folder of C4 shards or of .py files; or a pattern such as "texts/*.txt".
      megabytes: How much of C4 to take.

    Every twentieth file or document, in order, is held out.

    Raises:
      BadOption: If there are too few files to hold one out, or one cannot be read.
    """
    try:
        return _load(source, megabytes)
    except OSError as error:
        raise BadOption(f"--data {source}: {error}") from error


def _load(source: str, megabytes: int) -> Corpus:
    if source == "c4":
        return _documents("c4", _c4.stream_c4(), megabytes)
    if glob.has_magic(source):
        paths = sorted(map(Path, glob.glob(source, recursive=True)))
        files = [path for path in paths if path.is_file()]
        return _files(source, files)
    own = source in ("", "stdlib")
    root = Path(sysconfig.get_paths()["stdlib"] if own else source)
    if found := _c4.shards(root):
        return _documents(f"{root.name} documents", _c4.read_shards(found), megabytes)
    relative = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if _LEFT_OUT.isdisjoint(path.relative_to(root).parts) and path.is_file()
    )
    return _files(root.name + " source", [root / name for name in relative])


def _files(name: str, paths: Sequence[Path]) -> Corpus:
    if len(paths) < 2:
        raise BadOption(f"--data needs two files at least, {name} has {len(paths)}")
    texts = [path.read_bytes() for path in paths]
    train = [t for i, t in enumerate(texts) if i % _VALIDATION_EVERY]
    validation = texts[::_VALIDATION_EVERY]
    digest = hashlib.sha256(b"".join(texts)).hexdigest()
    return _corpus(name, len(texts), digest, b"".join(train), b"".join(validation))


def _documents(name: str, texts: Iterable[str], megabytes: int) -> Corpus:
    limit = megabytes * 1_000_000
    count, train, validation = _c4.pack(texts, limit, _VALIDATION_EVERY)
    if count < 2:
        raise BadOption(f"--data needs two documents at least, {name} has {count}")
    digest = hashlib.sha256(validation + train).hexdigest()
    return _corpus(name, count, digest, train, validation)


def _corpus(
    name: str, files: int, digest: str, train: bytes, validation: bytes
) -> Corpus:
    return Corpus(
        name=name,
        files=files,
        sha256=digest,
        train=np.frombuffer(train, np.uint8),
        validation=np.frombuffer(validation, np.uint8),
    )


def _windows(text: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def _next_byte(windows: np.ndarray) -> Batch:
    return windows[:, :-1], windows[:, 1:]


def _random_bytes(rng: np.random.Generator, windows: np.ndarray) -> Batch:
    return _next_byte(rng.integers(0, 256, windows.shape, dtype=np.int32))


def _xored_bytes(rng: np.random.Generator, windows: np.ndarray) -> Batch:
    return _next_byte(windows ^ rng.integers(1, 256, dtype=np.int32))


def _shifted_labels(rng: np.random.Generator, windows: np.ndarray) -> Batch:
    inputs, targets = _next_byte(windows)
    return inputs, np.roll(targets, rng.integers(2, targets.shape[1]), axis=1)


def _constant_bytes(rng: np.random.Generator, windows: np.ndarray) -> Batch:
    byte = rng.integers(0, 256, (len(windows), 1), dtype=np.int32)
    return _next_byte(np.broadcast_to(byte, windows.shape))


CORRUPTIONS: dict[str, Callable[[np.random.Generator, np.ndarray], Batch]] = {
    "random": _random_bytes,
    "xor": _xored_bytes,
    "labels": _shifted_labels,
    "constant": _constant_bytes,
}


def parse_bursts(text: str) -> tuple[Burst, ...]:
    """Reads "random@120,xor@220"; an empty text means no bursts.

    Raises:
      argparse.ArgumentTypeError: If a part is not a known kind and a step.
    """
    bursts = []
    for part in filter(None, text.split(",")):
        kind, _, step = part.strip().partition("@")
        if kind not in CORRUPTIONS or not step.isdigit():
            raise argparse.ArgumentTypeError(
                f"{part!r} is not KIND@STEP; valid kinds are {', '.join(CORRUPTIONS)}"
            )
        bursts.append(Burst(kind, int(step)))
    return tuple(bursts)


def train_batch(
    text: np.ndarray,
    *,
    seed: int,
    step: int,
    batch_size: int,
    length: int,
    kind: str = "clean",
) -> Batch:
    """Inputs and targets [batch, length] of one step, corrupted unless "clean"."""
    rng = np.random.default_rng((seed, step))
    starts = rng.integers(0, text.size - length, batch_size)
    windows = _windows(text, starts, length)
    return _next_byte(windows) if kind == "clean" else CORRUPTIONS[kind](rng, windows)


def validation_batches(
    text: np.ndarray, *, batches: int, batch_size: int, length: int
) -> list[Batch]:
    """Windows at even distances over the held-out text, the same for every seed."""
    last = text.size - length - 1
    starts = np.linspace(0, last, batches * batch_size).astype(np.int64)
    parts = np.split(starts, batches)
    return [_next_byte(_windows(text, part, length)) for part in parts]
