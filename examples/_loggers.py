"""Loggers for `clip_metrics`: JSONL, TensorBoard, Weights & Biases.

Each takes a step and a flat dict of scalars, arrays on any device, and fetches them in
one transfer. What any of them writes, ``adagc-replay`` reads.
"""

import json
import operator
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np


def as_floats(scalars: Mapping[str, Any]) -> dict[str, float | int]:
    """Python numbers; a float32 becomes the float64 of the same value."""
    values = jax.device_get(list(scalars.values()))
    arrays = dict(zip(scalars, map(np.asarray, values), strict=True))
    for name, array in arrays.items():
        if array.size != 1:
            raise ValueError(
                f"{name!r} must be a scalar, got an array of shape {array.shape}: log "
                "its norm or mean, or each number under a name of its own."
            )
    return {name: array.item() for name, array in arrays.items()}


class Closing:
    """Opens itself at the start of a ``with`` block, and closes itself at its end."""

    def open(self) -> None:
        """Nothing, unless there is something to start."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Logger(Closing):
    """Takes a step and its scalars."""

    def __call__(self, step: int, scalars: Mapping[str, Any]) -> None:
        raise NotImplementedError


class JsonlLogger(Logger):
    """One JSON object a line, ``{"step": 0, "loss": 2.3, "clip/...": ...}``.

    A file that is there is continued. Each row is in it at once: what a crash leaves
    behind is what led up to it.
    """

    def __init__(self, path: str | Path):
        self.file = open(path, "ab+")  # noqa: SIM115
        if self.file.seek(0, os.SEEK_END):
            # The job before may have been stopped in the middle of a line.
            self.file.seek(-1, os.SEEK_END)
            if self.file.read(1) != b"\n":
                self.file.write(b"\n")

    def __call__(self, step: int, scalars: Mapping[str, Any]) -> None:
        # NaN and Infinity are written as such: they are what happened.
        row = {"step": operator.index(step)} | as_floats(scalars)
        self.file.write(json.dumps(row).encode() + b"\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class TensorBoardLogger(Logger):
    """Event files for TensorBoard, written by ``tensorboardX``."""

    def __init__(self, folder: str | Path, start: int = 0):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "TensorBoardLogger needs tensorboardX: pip install tensorboardX."
            ) from error
        # What an earlier run has written of the same steps does not count any more.
        # Their files are named by the second, and must not be written over.
        self.writer = SummaryWriter(
            str(folder), purge_step=start or None, filename_suffix=f".{start:09}"
        )

    def __call__(self, step: int, scalars: Mapping[str, Any]) -> None:
        for name, value in as_floats(scalars).items():
            self.writer.add_scalar(name, value, operator.index(step))

    def close(self) -> None:
        self.writer.close()


class WandbLogger(Logger):
    """A run of Weights & Biases: ``WandbLogger(wandb.init(project=...))``."""

    def __init__(self, run: Any):
        self.run = run

    def __call__(self, step: int, scalars: Mapping[str, Any]) -> None:
        self.run.log(as_floats(scalars), step=operator.index(step))

    def close(self) -> None:
        self.run.finish()
