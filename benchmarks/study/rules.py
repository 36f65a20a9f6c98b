"""The clippers that compete, each with the same number of settings to choose from."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import optax

import adagc_jax

Make = Callable[..., optax.GradientTransformation]
NO_LIMIT = 1e30


@dataclasses.dataclass(frozen=True)
class Rule:
    """A clipper as a function of numbers, so that one program serves all settings.

    Attributes:
      name: In tables.
      make: From hyper-parameters, which may be traced, and `groups` to the transform.
      names: Of the hyper-parameters.
      settings: Their values, one tuple per setting; the first are the defaults.
      groups: Whether `make` takes groups.
    """

    name: str
    make: Make
    names: tuple[str, ...] = ()
    settings: tuple[tuple[float, ...], ...] = ((),)
    groups: bool = True

    def clipper(self, values: Any, groups: Any) -> optax.GradientTransformation:
        """The transform for one setting, an array or a tuple of numbers."""
        options: dict[str, Any] = {
            name: jnp.asarray(values[i], _COUNTS.get(name, jnp.float32))
            for i, name in enumerate(self.names)
        }
        return self.make(**options, **({"groups": groups} if self.groups else {}))

    def describe(self, setting: tuple[float, ...]) -> str:
        pairs = zip(self.names, setting, strict=True)
        return ", ".join(f"{name} {value:g}" for name, value in pairs)


_COUNTS: Mapping[str, Any] = {"warmup_steps": jnp.int32, "patience": jnp.int32}
_ADAGC = ("lambda_rel", "beta", "warmup_steps")
_ADAGC_SETTINGS = (
    (1.04, 0.99, 100),
    (1.04, 0.99, 20),
    (1.1, 0.99, 20),
    (1.3, 0.99, 20),
    (1.3, 0.99, 100),
    (1.5, 0.99, 20),
)
_ROBUST = ("lambda_rel", "beta", "tail", "patience", "warmup_steps")


def _zclip(z_thresh: Any, max_grad_norm: Any) -> optax.GradientTransformation:
    return adagc_jax.zclip(z_thresh=z_thresh, max_grad_norm=max_grad_norm)


def _ema(**options: Any) -> optax.GradientTransformation:
    return adagc_jax.adagc(warmup_init="ema", **options)


RULES = (
    Rule("none", lambda: optax.identity(), groups=False),
    Rule(
        "global_gc",
        adagc_jax.global_gc,
        ("max_norm",),
        ((1.0,), (0.125,), (0.25,), (0.5,), (2.0,), (4.0,)),
        groups=False,
    ),
    Rule(
        "zclip",
        _zclip,
        ("z_thresh", "max_grad_norm"),
        (
            (2.5, 1.0),
            (1.5, 1.0),
            (3.5, 1.0),
            (2.5, NO_LIMIT),
            (1.5, NO_LIMIT),
            (2.5, 0.5),
        ),
        groups=False,
    ),
    Rule(
        "clip_by_value",
        adagc_jax.clip_by_value,
        ("limit",),
        ((0.01,), (0.001,), (0.003,), (0.03,), (0.1,), (0.3,)),
        groups=False,
    ),
    Rule(
        "agc",
        adagc_jax.agc,
        ("clipping",),
        ((0.01,), (0.00125,), (0.0025,), (0.005,), (0.02,), (0.04,)),
        groups=False,
    ),
    Rule(
        "tensor_gc",
        adagc_jax.tensor_gc,
        ("max_norm",),
        ((1.0,), (0.015,), (0.03,), (0.06,), (0.125,), (0.25,)),
    ),
    Rule("adagc", adagc_jax.adagc, _ADAGC, _ADAGC_SETTINGS),
    Rule("adagc, ema", _ema, _ADAGC, _ADAGC_SETTINGS),
    Rule(
        "robust_gc",
        adagc_jax.robust_gc,
        _ROBUST,
        (
            (1.3, 0.99, 3, 6, 20),
            (1.3, 0.99, 3, 12, 20),
            (1.3, 0.99, 1, 6, 20),
            (1.5, 0.99, 1, 6, 20),
            (2.0, 0.99, 1, 6, 20),
            (2.0, 0.99, 3, 6, 20),
        ),
    ),
)

# Which of its numbers matters: around robust_gc's defaults, on the tuning half only.
GRID = Rule(
    "robust_gc, grid",
    adagc_jax.robust_gc,
    _ROBUST,
    (
        *(
            (1.3, 0.99, tail, patience, 20)
            for tail in (1, 3)
            for patience in (3, 6, 12, 24)
        ),
        (1.3, 0.99, 0, 0, 20),
        (1.15, 0.99, 3, 6, 20),
        (1.5, 0.99, 3, 12, 20),
        (1.3, 0.95, 3, 12, 20),
        (1.3, 0.99, 3, 6, 0),
        (1.3, 0.99, 3, 6, 100),
    ),
)
