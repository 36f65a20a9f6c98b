"""The z-score rule: a limit from mean and variance of the group's own norms."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from adagc_jax.checks import Hyper, evaluate, evaluate_count
from adagc_jax.rules import Observation, Rule, shrink_to


class ZScoreState(NamedTuple):
    """``mean`` and ``var``: of each group's norms, f32; population variance."""

    mean: Float[Array, "*groups"]
    var: Float[Array, "*groups"]


# ZClip adds this to the norm it divides by, whatever its eps is.
_ZCLIP_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class ZScore(Rule):
    """ZClip, arXiv 2504.02507: a limit from the z-score of the norm.

    The first ``warmup_steps`` observations of a group give mean and variance. Then,
    with ``z = (n - mean) / (std + eps)``, a spike (``z > z_thresh``) gets the limit
    ``(mean + z_thresh * std / (z / z_thresh)) * clip_factor`` (adaptive scaling) or
    ``mean``; in mode ``"percentile"`` it is ``mean + z_thresh * std`` if exceeded.
    ``max_grad_norm`` bounds the emitted norm always. The averages see the limit for a
    spike and ``n`` otherwise: ``mean' = alpha * mean + (1 - alpha) * x`` and
    ``var' = alpha * var + (1 - alpha) * (x - mean')**2``.
    """

    alpha: Hyper
    z_thresh: Hyper
    max_grad_norm: Hyper | None
    eps: float
    warmup_steps: int
    mode: str
    clip_option: str
    clip_factor: Hyper
    skip_update_on_spike: bool

    def init(self, shape: tuple[int, ...]) -> ZScoreState:
        """No observation yet."""
        return ZScoreState(*(jnp.zeros(shape, jnp.float32) for _ in range(2)))

    def scale(self, obs: Observation, state: ZScoreState) -> jax.Array:
        """Shrinks to the lower of the z-score's limit and the fixed one."""
        spike, limit = self._limit(obs, state)
        emitted = jnp.where(spike, limit, obs.norm)
        if self.max_grad_norm is not None:
            emitted = jnp.minimum(emitted, evaluate(self.max_grad_norm, obs.step))
        return shrink_to(emitted, obs.norm, _ZCLIP_EPS)

    def update(
        self, obs: Observation, scale: jax.Array, state: ZScoreState
    ) -> ZScoreState:
        """Plain statistics in warm-up, exponential ones after it."""
        del scale
        spike, limit = self._limit(obs, state)
        sample = jnp.where(spike, limit, obs.norm)
        warm = self._welford(sample, obs, state)
        moved = self._ema(sample, obs, state)
        if self.skip_update_on_spike:
            moved = jax.tree.map(lambda n, o: jnp.where(spike, o, n), moved, state)
        warming_up = self._warming_up(obs)
        return jax.tree.map(lambda w, m: jnp.where(warming_up, w, m), warm, moved)

    def _warming_up(self, obs: Observation) -> jax.Array:
        # Without a single sample there is no mean to compare with.
        return obs.seen < jnp.maximum(evaluate_count(self.warmup_steps), 1)

    def _limit(
        self, obs: Observation, state: ZScoreState
    ) -> tuple[jax.Array, jax.Array]:
        """Which groups spike, and the limit that a spike gets."""
        std = jnp.sqrt(state.var)
        z_thresh = evaluate(self.z_thresh, obs.step)
        if self.mode == "percentile":
            limit = state.mean + z_thresh * std
            spike = obs.norm > limit
        else:
            z = (obs.norm - state.mean) / (std + evaluate(self.eps, obs.step))
            spike = z > z_thresh
            if self.clip_option == "mean":
                limit = state.mean
            else:
                factor = evaluate(self.clip_factor, obs.step)
                excess = jnp.where(spike, z / z_thresh, 1.0)
                limit = (state.mean + z_thresh * std / excess) * factor
        return spike & ~self._warming_up(obs), limit

    def _welford(
        self, sample: jax.Array, obs: Observation, state: ZScoreState
    ) -> ZScoreState:
        number = (obs.seen + 1).astype(jnp.float32)
        mean = state.mean + (sample - state.mean) / number
        # Both factors have the same sign, so the variance is never negative.
        squares = state.var * (number - 1.0)
        squares = squares + (sample - state.mean) * (sample - mean)
        return ZScoreState(mean=mean, var=squares / number)

    def _ema(
        self, sample: jax.Array, obs: Observation, state: ZScoreState
    ) -> ZScoreState:
        alpha = evaluate(self.alpha, obs.step)
        mean = alpha * state.mean + (1.0 - alpha) * sample
        deviation = jnp.square(sample - mean)
        return ZScoreState(mean=mean, var=alpha * state.var + (1.0 - alpha) * deviation)
