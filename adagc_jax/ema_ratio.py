"""The EMA-relative rule: AdaGC, and its redescending form."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from adagc_jax.checks import Hyper, complement, evaluate, evaluate_count
from adagc_jax.rules import Observation, Rule, shrink_to


class EmaRatioState(NamedTuple):
    """What each group remembers.

    Attributes:
      gamma: Reference norm, f32; unused while no norm was seen.
      outliers: Norms beyond the limit in a row, up to and with the last one, i32;
        0 during the warm-up of the tree.
      level: Harmonic mean of the norms in that row, f32: where the group has been
        while it was clipped. A single spike among them hardly moves it.
    """

    gamma: Float[Array, "*groups"]
    outliers: Int[Array, "*groups"]
    level: Float[Array, "*groups"]


@dataclasses.dataclass(frozen=True)
class EmaRatio(Rule):
    """A limit relative to the group's own past: AdaGC, arXiv 2502.11034.

    After warm-up, with ``n`` the norm, ``gamma`` the reference and
    ``limit = lambda_rel * gamma``::

        h = min(1, limit / (n + eps))
        gamma' = beta * gamma + (1 - beta) * min(n, limit)

    In the first ``warmup_steps`` updates ``h = min(1, lambda_abs / (total + eps))``
    with the norm of all groups together. ``warmup_init="min"`` keeps there the
    smallest ``h * n``; ``"ema"`` keeps the bias-corrected average of all clipped
    norms, during warm-up and after. A group first seen after warm-up is not clipped
    and starts with its own norm.

    With a ``tail``, the first ``patience`` outliers in a row (norms beyond the limit)
    get ``h = (limit / (n + eps)) ** (1 + tail)``: the further out, the less of them is
    left. Tail 0 is AdaGC.

    With ``release``, the reference of a group that has been clipped in so many updates
    in a row starts again at their harmonic mean.
    """

    lambda_rel: Hyper
    beta: Hyper
    lambda_abs: Hyper
    warmup_steps: int
    warmup_init: str = "min"
    eps: float = 0.0
    tail: Hyper = 0.0
    patience: int = 0
    release: int | None = None

    needs_total: ClassVar[bool] = True

    def init(self, shape: tuple[int, ...]) -> EmaRatioState:
        """No reference yet."""
        return EmaRatioState(
            gamma=jnp.zeros(shape, jnp.float32),
            outliers=jnp.zeros(shape, jnp.int32),
            level=jnp.zeros(shape, jnp.float32),
        )

    def uses_total(self, step: Int[Array, ""]) -> jax.Array:
        """In warm-up."""
        return step < evaluate_count(self.warmup_steps)

    def scale(self, obs: Observation, state: EmaRatioState) -> jax.Array:
        """GlobalGC in warm-up, the reference's multiple after it."""
        eps = evaluate(self.eps, obs.step)
        relative = shrink_to(self._limit(obs, state), obs.norm, eps)
        relative = self._redescend(relative, obs, state)
        if obs.total is None:
            return relative
        return jnp.where(self.uses_total(obs.step), self._global_scale(obs), relative)

    def update(
        self, obs: Observation, scale: jax.Array, state: EmaRatioState
    ) -> EmaRatioState:
        """The reference sees the norm up to the limit: one spike moves it little."""
        del scale
        # min(n, limit) and not h * n, which is not exactly the limit.
        clipped = jnp.minimum(obs.norm, self._limit(obs, state))
        gamma = self._average(clipped, obs, state.gamma)
        moved = self._released(self._count(obs, state)._replace(gamma=gamma))
        if obs.total is None:
            return moved
        warm = state._replace(
            gamma=self._warmup_gamma(obs, state.gamma),
            outliers=jnp.zeros_like(state.outliers),
        )
        in_warmup = self.uses_total(obs.step)
        return jax.tree.map(lambda w, m: jnp.where(in_warmup, w, m), warm, moved)

    def _limit(self, obs: Observation, state: EmaRatioState) -> jax.Array:
        limit = evaluate(self.lambda_rel, obs.step) * state.gamma
        return jnp.where(obs.seen > 0, limit, jnp.inf)

    def _redescend(
        self, scale: jax.Array, obs: Observation, state: EmaRatioState
    ) -> jax.Array:
        """Shrinks outliers beyond the limit, as long as patience lasts."""
        if isinstance(self.tail, int | float) and self.tail == 0.0:
            return scale
        muted = scale * jnp.power(scale, evaluate(self.tail, obs.step))
        # Not down to zero, which would look like a group that was dropped.
        muted = jnp.maximum(muted, jnp.finfo(jnp.float32).tiny)
        impatient = state.outliers >= evaluate_count(self.patience)
        return jnp.where((scale == 1.0) | impatient, scale, muted)

    def _count(self, obs: Observation, state: EmaRatioState) -> EmaRatioState:
        """One outlier more in the row, or the end of it."""
        outlier = obs.norm > self._limit(obs, state)
        before = state.outliers.astype(jnp.float32)
        inverse = before / jnp.where(before > 0.0, state.level, 1.0) + 1.0 / obs.norm
        return state._replace(
            outliers=jnp.where(outlier, state.outliers + 1, 0),
            level=jnp.where(outlier, (before + 1.0) / inverse, state.level),
        )

    def _released(self, state: EmaRatioState) -> EmaRatioState:
        if self.release is None:
            return state
        free = state.outliers >= evaluate_count(self.release)
        return state._replace(
            gamma=jnp.where(free, state.level, state.gamma),
            outliers=jnp.where(free, 0, state.outliers),
        )

    def _global_scale(self, obs: Observation) -> jax.Array:
        assert obs.total is not None
        limit = evaluate(self.lambda_abs, obs.step)
        return shrink_to(limit, obs.total, evaluate(self.eps, obs.step))

    def _warmup_gamma(self, obs: Observation, gamma: jax.Array) -> jax.Array:
        emitted = obs.norm * self._global_scale(obs)
        if self.warmup_init == "ema":
            return self._average(emitted, obs, gamma)
        return jnp.where(obs.seen > 0, jnp.minimum(gamma, emitted), emitted)

    def _average(
        self, norm: jax.Array, obs: Observation, gamma: jax.Array
    ) -> jax.Array:
        weight = complement(self.beta, obs.step)
        if self.warmup_init == "ema":
            # The bias-corrected average as a recursion on itself: 1 - beta**k in the
            # denominator, written so that it keeps its digits for beta near 1.
            number = (obs.seen + 1).astype(jnp.float32)
            weight = weight / -jnp.expm1(number * jnp.log1p(-weight))
        moved = gamma + weight * (norm - gamma)
        return jnp.where(obs.seen > 0, moved, norm)
