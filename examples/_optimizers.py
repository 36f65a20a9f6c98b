"""The optimizers of the job: a clipper, then AdamW, Lion or Muon."""

from typing import Any

import jax
import optax
from _clippers import new_clipper
from _config import Config

import adagc_jax


def new_optimizer(name: str, config: Config) -> optax.GradientTransformationExtraArgs:
    """The clipper, then an optimizer with a linear warm-up and a cosine decay.

    A guard goes around both: a step that it skips must leave them as they were.
    """
    optimizer = optax.chain(new_clipper(name, config), _descent(config))
    if config.guard:
        return adagc_jax.guard(optimizer, spike=config.spike_rule)
    return optax.with_extra_args_support(optimizer)


def _descent(config: Config) -> optax.GradientTransformation:
    schedule = adagc_jax.schedules.warmup_cosine(config.peak_lr, config.steps)
    decay, b2, eps = config.weight_decay, config.b2, config.eps
    if config.optimizer == "lion":
        return optax.lion(schedule, b2=b2, weight_decay=decay)
    if config.optimizer == "muon":
        return optax.contrib.muon(
            schedule,
            eps=eps,
            weight_decay=decay,
            adam_b2=b2,
            adam_weight_decay=decay,
            muon_weight_dimension_numbers=_matrices,
        )
    return optax.adamw(schedule, b2=b2, eps=eps, weight_decay=decay)


def _matrices(params: Any) -> Any:
    """Which two axes of a tensor are a matrix; those before them are stacked ones."""

    def axes(path: Any, x: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        # Vectors, also when they are stacked, and both ends of the model are Adam's.
        if x.ndim < 2 or "embed" in name or "norm" in name:
            return None
        return optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)

    return jax.tree_util.tree_map_with_path(axes, params)
