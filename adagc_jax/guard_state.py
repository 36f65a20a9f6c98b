"""The state of a guard: what it keeps, how it counts, and what a skip leaves alone."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from adagc_jax.guard_policies import REASONS, Policies, Verdict
from adagc_jax.metrics import Scalars
from adagc_jax.spikes import SpikeMonitorState


class GuardState(NamedTuple):
    """State of `guard`; its structure does not depend on the policies.

    Attributes:
      inner: State of the guarded optimizer.
      norm_window: Past global norms (their logarithms in the log domain), f32[window].
      loss_window: Past losses, likewise; empty as long as none was given.
      guard_step: Updates seen, i32[].
      skipped: Skipped updates per reason, i32[6], in the order of `REASONS`.
      accepted: Updates that a policy objected to and that took place nonetheless,
        since there had been `max_consecutive` of them, i32[].
      consecutive: Updates skipped since the last one without objection, i32[].
      last_reason: Why the last update was skipped: 1 + index in `REASONS`; 0 if it
        was not, i32[].
      gave_up: Whether the guard has given up at any time, bool[].
      norm: Last global norm that was finite, f32[].
      z: Scores of the last norm and loss against their windows, f32[2].
    """

    inner: Any
    norm_window: SpikeMonitorState
    loss_window: SpikeMonitorState
    guard_step: jax.Array
    skipped: jax.Array
    accepted: jax.Array
    consecutive: jax.Array
    last_reason: jax.Array
    gave_up: jax.Array
    norm: jax.Array
    z: jax.Array


def guard_metrics(opt_state: Any, *, prefix: str = "guard") -> Scalars:
    r"""Named scalars of the guards in an optimizer state.

    ``skipped`` is :math:`\sum_r s_r` over the reasons, with :math:`s_r` the updates
    that were skipped for reason :math:`r`, ``skipped_nonfinite_grads`` and so on.

    Args:
      opt_state: Any optimizer state with a guard in it, at any depth. Several guards
        are numbered from the outside in, in the order of the state:
        ``guard/0/skipped``.
      prefix: First part of every name.

    Returns:
      A flat dict from names to i32[], f32[] or bool[] arrays: ``step`` (updates seen),
      ``skipped``, ``skipped_<reason>`` for every one of `REASONS`, ``accepted``,
      ``consecutive``, ``last_reason``, ``gave_up``, ``norm``, ``norm_z`` and
      ``loss_z``, as described in `GuardState`. Works under ``jit``.

    Raises:
      ValueError: if there is no guard in ``opt_state``.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from adagc_jax.guard import guard
      >>> optimizer = guard(optax.sgd(0.1), max_norm=10.0)
      >>> grads = {"w": jnp.array([30.0, 40.0])}
      >>> _, state = optimizer.update(grads, optimizer.init(grads))
      >>> metrics = guard_metrics(state)
      >>> print(metrics["guard/skipped_max_norm"], metrics["guard/norm"])
      1 50.0

    Reference:
      SkipStep of OLMo 2, https://arxiv.org/abs/2501.00656.
    """
    states = list(find_guard_states(opt_state))
    if not states:
        raise ValueError(
            "opt_state holds no guard: pass the state of an optimizer in guard(...)."
        )
    scalars: Scalars = {}
    for number, state in enumerate(states):
        start = prefix if len(states) == 1 else f"{prefix}/{number}"
        scalars |= {f"{start}/{k}": v for k, v in _scalars(state).items()}
    return scalars


def new_guard_state(policies: Policies, inner_state: Any) -> GuardState:
    """The state before the first update."""

    def zero() -> jax.Array:
        # One array per field: the same buffer cannot be donated twice.
        return jnp.zeros((), jnp.int32)

    return GuardState(
        inner=inner_state,
        norm_window=policies.rule.monitor().init(),
        loss_window=policies.rule.monitor().init(),
        guard_step=zero(),
        skipped=jnp.zeros((len(REASONS),), jnp.int32),
        accepted=zero(),
        consecutive=zero(),
        last_reason=zero(),
        gave_up=jnp.zeros((), bool),
        norm=jnp.zeros((), jnp.float32),
        z=jnp.zeros((2,), jnp.float32),
    )


def tally(state: GuardState, verdict: Verdict) -> GuardState:
    """The counts after a step with this verdict."""
    flagged, skip, give_up, reason = verdict
    is_reason = jnp.arange(len(REASONS), dtype=jnp.int32) == reason
    return state._replace(
        guard_step=jnp.asarray(optax.safe_increment(state.guard_step)),
        skipped=state.skipped + (skip & is_reason).astype(jnp.int32),
        accepted=state.accepted + (flagged & ~skip).astype(jnp.int32),
        consecutive=jnp.where(flagged, state.consecutive + skip.astype(jnp.int32), 0),
        last_reason=jnp.where(skip, reason + 1, 0),
        gave_up=state.gave_up | give_up,
    )


def freeze_if(skip: jax.Array, old: Any, new: Any) -> Any:
    """``old`` where the step is skipped. Never a product: 0 * NaN is NaN."""

    def select(new_leaf: Any, old_leaf: Any) -> Any:
        dtype = getattr(new_leaf, "dtype", None)
        if dtype is not None and dtype != getattr(old_leaf, "dtype", dtype):
            # Some optimizers widen their state at the first update.
            old_leaf = old_leaf.astype(dtype)
        return jnp.where(skip, old_leaf, new_leaf)

    # The new tree leads: names of tensors that a checkpoint lost are back in it.
    return jax.tree.map(select, new, old)


def emit_nothing_if(skip: jax.Array, updates: Any) -> Any:
    """Zeros where the step is skipped."""

    def select(leaf: Any) -> Any:
        if getattr(leaf, "dtype", None) == jax.dtypes.float0:
            return leaf
        # x + -0.0 is x for every x; x + 0.0 is not, for x = -0.0.
        return jnp.where(skip, -jnp.zeros_like(leaf), leaf)

    return jax.tree.map(select, updates)


def find_guard_states(opt_state: Any) -> Iterator[GuardState]:
    """All guards inside an optimizer state, an outer one before those in it."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, GuardState))
    for node in nodes:
        if isinstance(node, GuardState):
            yield node
            yield from find_guard_states(node.inner)


def _scalars(state: GuardState) -> Scalars:
    by_reason = {
        f"skipped_{reason}": state.skipped[index]
        for index, reason in enumerate(REASONS)
    }
    return {
        "step": state.guard_step,
        "skipped": jnp.sum(state.skipped, dtype=jnp.int32),
        **by_reason,
        "accepted": state.accepted,
        "consecutive": state.consecutive,
        "last_reason": state.last_reason,
        "gave_up": state.gave_up,
        "norm": state.norm,
        "norm_z": state.z[0],
        "loss_z": state.z[1],
    }
