"""Rules: norms in, scales out.

A rule never sees a gradient. It gets the norms of some groups as one array and answers
elementwise with the scale of each group and with its own next state, so the same lines
serve one number, the layers of a model or the units of a tensor. What every rule needs
is done around it: a zero norm is passed through and a non-finite one handled by policy,
and in neither case does the rule's state move.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from adagc_jax.checks import Hyper, complement, evaluate, evaluate_count


class Observation(NamedTuple):
    """What a rule sees of some groups in one update.

    Attributes:
      norm: Incoming norms, f32 of the groups' shape; positive and finite wherever the
        answer is used.
      seen: Active observations of each group before this one, i32 of the same shape.
      step: Updates made before this one, i32[].
      total: Norm of all finite groups together, f32[]; None unless the rule needs it
        and the phase is not ``"steady"``.
      param_norm: Norms of the parameters in the same groups; None unless needed.
    """

    norm: Float[Array, "*groups"]
    seen: Int[Array, "*groups"]
    step: Int[Array, ""]
    total: Float[Array, ""] | None = None
    param_norm: Float[Array, "*groups"] | None = None


class Rule:
    """Base of all rules; a subclass is a frozen dataclass of hyper-parameters.

    A rule without memory defines `scale` only. One with memory returns from `init` a
    named tuple of float32 arrays of the given shape, reads it in `scale`, and returns
    the next one from `update`.

    Example:
      >>> import dataclasses, jax, jax.numpy as jnp, adagc_jax
      >>> @dataclasses.dataclass(frozen=True)
      ... class Damp(adagc_jax.Rule):
      ...     limit: float
      ...     def scale(self, obs, state):
      ...         return jax.lax.rsqrt(1.0 + (obs.norm / self.limit) ** 2)
      >>> clip = adagc_jax.clip_by_rule(Damp(limit=1.0))
      >>> updates, _ = clip.update({"w": jnp.ones(4)}, clip.init({"w": jnp.ones(4)}))
      >>> print(updates["w"])
      [0.4472136 0.4472136 0.4472136 0.4472136]
    """

    needs_total: ClassVar[bool] = False
    needs_params: ClassVar[bool] = False

    def init(self, shape: tuple[int, ...]) -> Any:
        """State of groups of the given shape before the first observation."""
        del shape
        return ()

    def scale(self, obs: Observation, state: Any) -> jax.Array:
        """The factor by which each group's gradient is multiplied, f32."""
        raise NotImplementedError

    def update(self, obs: Observation, scale: jax.Array, state: Any) -> Any:
        """The state after this observation."""
        del obs, scale
        return state


@dataclasses.dataclass(frozen=True)
class FixedNorm(Rule):
    """``h = min(1, max_norm / (n + eps))``: a limit that never changes."""

    max_norm: Hyper
    eps: float = 0.0

    def scale(self, obs: Observation, state: Any) -> jax.Array:
        """Shrinks to the limit."""
        limit = evaluate(self.max_norm, obs.step)
        return shrink_to(limit, obs.norm, evaluate(self.eps, obs.step))


@dataclasses.dataclass(frozen=True)
class ParamRatio(Rule):
    """``h = min(1, clipping * max(||W||, eps) / n)``: AGC, arXiv 2102.06171."""

    clipping: Hyper
    eps: float = 1e-3

    needs_params: ClassVar[bool] = True

    def scale(self, obs: Observation, state: Any) -> jax.Array:
        """Shrinks to a fraction of the parameter's norm."""
        assert obs.param_norm is not None
        floor = jnp.maximum(obs.param_norm, evaluate(self.eps, obs.step))
        return shrink_to(evaluate(self.clipping, obs.step) * floor, obs.norm)


class EmaRatioState(NamedTuple):
    """``gamma``: the reference norm of each group, f32; unused while none was seen."""

    gamma: Float[Array, "*groups"]


@dataclasses.dataclass(frozen=True)
class EmaRatio(Rule):
    """AdaGC, arXiv 2502.11034: a limit relative to the group's own past.

    After warm-up, with ``n`` the norm and ``gamma`` the reference::

        h = min(1, lambda_rel * gamma / (n + eps))
        gamma' = beta * gamma + (1 - beta) * min(n, lambda_rel * gamma)

    In the first ``warmup_steps`` updates ``h = min(1, lambda_abs / (total + eps))``
    with the norm of all groups together. ``warmup_init="min"`` keeps there the
    smallest ``h * n``; ``"ema"`` keeps the bias-corrected average of all clipped
    norms, during warm-up and after. A group first seen after warm-up is not clipped
    and starts with its own norm.
    """

    lambda_rel: Hyper
    beta: Hyper
    lambda_abs: Hyper
    warmup_steps: int
    warmup_init: str = "min"
    eps: float = 0.0

    needs_total: ClassVar[bool] = True

    def init(self, shape: tuple[int, ...]) -> EmaRatioState:
        """No reference yet."""
        return EmaRatioState(gamma=jnp.zeros(shape, jnp.float32))

    def scale(self, obs: Observation, state: EmaRatioState) -> jax.Array:
        """GlobalGC in warm-up, the reference's multiple after it."""
        eps = evaluate(self.eps, obs.step)
        relative = shrink_to(self._limit(obs, state), obs.norm, eps)
        if obs.total is None:
            return relative
        return jnp.where(self._warming_up(obs), self._global_scale(obs), relative)

    def update(
        self, obs: Observation, scale: jax.Array, state: EmaRatioState
    ) -> EmaRatioState:
        """The reference sees the clipped norm, so that one spike moves it little."""
        del scale
        # min(n, limit) and not h * n, which is not exactly the limit.
        clipped = jnp.minimum(obs.norm, self._limit(obs, state))
        gamma = self._average(clipped, obs, state.gamma)
        if obs.total is not None:
            gamma = jnp.where(
                self._warming_up(obs), self._warmup_gamma(obs, state.gamma), gamma
            )
        return EmaRatioState(gamma=gamma)

    def _warming_up(self, obs: Observation) -> jax.Array:
        return obs.step < evaluate_count(self.warmup_steps)

    def _limit(self, obs: Observation, state: EmaRatioState) -> jax.Array:
        limit = evaluate(self.lambda_rel, obs.step) * state.gamma
        return jnp.where(obs.seen > 0, limit, jnp.inf)

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


def shrink_to(limit: jax.Array, norm: jax.Array, eps: Any = 0.0) -> jax.Array:
    """``limit / (norm + eps)`` where the norm exceeds the limit, else 1."""
    exceeds = norm > limit
    return jnp.where(exceeds, limit / jnp.where(exceeds, norm + eps, 1.0), 1.0)
