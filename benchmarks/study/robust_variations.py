"""Other ways to redescend than `robust_gc`'s, for the ablations.

A floor keeps a part of every outlier; an average of logarithms is moved less by them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import adagc_jax
from adagc_jax.ema_ratio import EmaRatio, EmaRatioState

WARMUP = 20


@dataclasses.dataclass(frozen=True)
class Floored(EmaRatio):
    """No outlier is emitted with less than half the reference norm."""

    def scale(self, obs: adagc_jax.Observation, state: EmaRatioState) -> jax.Array:
        scale = super().scale(obs, state)
        floor = jnp.minimum(0.5 * state.gamma / obs.norm, 1.0)
        return jnp.where(self.uses_total(obs.step), scale, jnp.maximum(scale, floor))


@dataclasses.dataclass(frozen=True)
class Geometric(EmaRatio):
    """The reference is an average of logarithms of norms."""

    def _average(
        self, norm: jax.Array, obs: adagc_jax.Observation, gamma: jax.Array
    ) -> jax.Array:
        # The weight of the arithmetic average, which moves from 0 to 1 by it.
        zero, one = jnp.zeros_like(gamma), jnp.ones_like(gamma)
        weight = super()._average(one, obs, zero)
        ratio = norm / jnp.where(obs.seen > 0, gamma, norm)
        return jnp.where(obs.seen > 0, gamma * ratio**weight, norm)


def clipper(rule: type[EmaRatio]) -> Callable[..., optax.GradientTransformation]:
    """`robust_gc` with another rule."""

    def make(tail: Any, patience: Any, groups: Any) -> optax.GradientTransformation:
        numbers: dict[str, Any] = {"tail": tail, "patience": patience}
        own = rule(1.3, 0.99, 1.0, WARMUP, warmup_init="ema", **numbers)
        return adagc_jax.clip_by_rule((own, groups))

    return make
