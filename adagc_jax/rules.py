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

from adagc_jax.checks import Hyper, evaluate


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
    named tuple of float32 or int32 arrays of the given shape, reads it in `scale`, and
    returns the next one from `update`.

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

    def uses_total(self, step: Int[Array, ""]) -> jax.Array | bool:
        """Whether update ``step`` of a rule that needs the total depends on it."""
        del step
        return self.needs_total

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


def shrink_to(limit: jax.Array, norm: jax.Array, eps: Any = 0.0) -> jax.Array:
    """``limit / (norm + eps)`` where the norm exceeds the limit, else 1."""
    exceeds = norm > limit
    return jnp.where(exceeds, limit / jnp.where(exceeds, norm + eps, 1.0), 1.0)
