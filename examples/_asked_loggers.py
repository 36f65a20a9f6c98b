"""The loggers that `--tensorboard` and `--wandb` ask for."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from _cli import check_installed, new_folder
from _clippers import slug
from _loggers import Logger, TensorBoardLogger, WandbLogger


def check_loggers(config: Any) -> None:
    """Raises BadOption if what `--tensorboard` or `--wandb` needs is missing."""
    if config.tensorboard:
        check_installed("--tensorboard", "tensorboardX")
        new_folder("--tensorboard", config.tensorboard)
    if config.wandb:
        check_installed("--wandb", "wandb")


def open_loggers(config: Any, name: str, start: int) -> list[Logger]:
    """Those that `--tensorboard` and `--wandb` ask for, for a run from step `start`.

    Of several processes, the first one logs.
    """
    loggers: list[Logger] = []
    if jax.process_index():
        return loggers
    run = f"{slug(name)}-seed{config.seed}"
    if config.tensorboard:
        loggers.append(TensorBoardLogger(Path(config.tensorboard) / run, start))
    if config.wandb:
        import wandb  # pyright: ignore[reportMissingImports]

        settings = dataclasses.asdict(config)
        loggers.append(
            WandbLogger(wandb.init(project=config.wandb, name=run, config=settings))
        )
    return loggers
