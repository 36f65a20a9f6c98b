"""The corpus (Python's own standard library), batches, and corrupted batches.

A batch is a pure function of (seed, step): whoever asks for step 120 gets the same
bytes, so every clipper is trained on exactly the same data.
"""

import argparse
import dataclasses
import hashlib
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np

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


def load_corpus(folder: str = "") -> Corpus:
    """Reads every .py file under `folder`, or of the standard library when empty.

    Every twentieth file, in sorted order, is held out for validation.

    Raises:
      ValueError: If there are too few files to hold one out.
    """
    root = Path(folder or sysconfig.get_paths()["stdlib"])
    relative = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if _LEFT_OUT.isdisjoint(path.relative_to(root).parts)
    )
    if len(relative) < 2:
        raise ValueError(f"needs two .py files at least, {root} has {len(relative)}")
    texts = [(root / name).read_bytes() for name in relative]
    train = [t for i, t in enumerate(texts) if i % _VALIDATION_EVERY]
    validation = texts[::_VALIDATION_EVERY]
    return Corpus(
        name=root.name + " source",
        files=len(texts),
        sha256=hashlib.sha256(b"".join(texts)).hexdigest(),
        train=np.frombuffer(b"".join(train), np.uint8),
        validation=np.frombuffer(b"".join(validation), np.uint8),
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
