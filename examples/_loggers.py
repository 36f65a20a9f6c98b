"""Loggers for `clip_metrics`: JSONL, TensorBoard, Weights & Biases.

Each takes a step and a flat dict of scalars, arrays on any device, and fetches them in
one transfer. What any of them writes, ``adagc-replay`` reads.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np


def as_floats(scalars: Mapping[str, Any]) -> dict[str, float | int]:
    """Python numbers; a float32 becomes the float64 of the same value."""
    values = jax.device_get(list(scalars.values()))
    numbers = [np.asarray(value).item() for value in values]
    return dict(zip(scalars, numbers, strict=True))


class Logger:
    """Closes itself at the end of a ``with`` block."""

    def __call__(self, step: int, scalars: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class JsonlLogger(Logger):
    """One JSON object a line, ``{"step": 0, "loss": 2.3, "clip/...": ...}``."""

    def __init__(self, path: str | Path):
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def __call__(self, step: int, scalars: Mapping[str, Any]) -> None:
        # NaN and Infinity are written as such: they are what happened.
        self.file.write(json.dumps({"step": step} | as_floats(scalars)) + "\n")

    def close(self) -> None:
        self.file.close()


class TensorBoardLogger(Logger):
    """Event files for TensorBoard, written by ``tensorboardX``."""

    def __init__(self, folder: str | Path):
        from tensorboardX import SummaryWriter

        self.writer = SummaryWriter(str(folder))

    def __call__(self, step: int, scalars: Mapping[str, Any]) -> None:
        for name, value in as_floats(scalars).items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandbLogger(Logger):
    """A run of Weights & Biases: ``WandbLogger(wandb.init(project=...))``."""

    def __init__(self, run: Any):
        self.run = run

    def __call__(self, step: int, scalars: Mapping[str, Any]) -> None:
        self.run.log(as_floats(scalars), step=step)

    def close(self) -> None:
        self.run.finish()
