"""What the guard looks at in a step, and which of its policies object.

Gradients and loss become two numbers, `Signals`; the policies turn these, and the
windows of their past values, into one flag per reason. Nothing here knows about
optimizers: whether a flagged step is skipped is decided in `guard`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from adagc_jax.checks import Hyper, check_count, check_hyper, evaluate, evaluate_count
from adagc_jax.leaves import clipped_leaves
from adagc_jax.norms import sum_squares
from adagc_jax.spikes import SpikeMonitorState, SpikeRule
from adagc_jax.state import ClipState

# The order is the priority: a skipped step counts under the first that applies.
REASONS = (
    "nonfinite_grads",
    "nonfinite_loss",
    "max_norm",
    "norm_spike",
    "loss_spike",
    "clipping",
)
# So many of them, from the left, are wrong whatever came before; the others only
# stand out from the past, and so might be the new normal.
ABSOLUTE = 3

# OLMo 2's, arXiv 2501.00656: active once half full, unbiased variance.
SKIP_STEP = SpikeRule(128, 6.0, direction="up", min_history=64, ddof=1)


@dataclasses.dataclass(frozen=True)
class ClipEvidence:
    """Objects to a step in which the clipper inside had too much to do.

    Args:
      max_fraction: Largest fraction of clipped tensors, in [0, 1]; 1 never objects.
      min_scale: Smallest scale that a tensor may get, in [0, 1]; 0 never objects.
      warmup_steps: Updates of the clipper that are not judged. AdaGC clips all
        tensors together while it warms up, which is no evidence of anything.

    Raises:
      ValueError: if an argument is outside its range.

    Example:
      >>> import adagc_jax, optax
      >>> from adagc_jax.guard import guard
      >>> inner = optax.chain(adagc_jax.adagc(warmup_steps=100), optax.adamw(1e-3))
      >>> guarded = guard(inner, evidence=ClipEvidence(min_scale=0.01))

    Reference:
      The diagnostics of AdaGC, https://arxiv.org/abs/2502.11034.
    """

    max_fraction: float = 1.0
    min_scale: float = 0.0
    warmup_steps: int = 100

    def __post_init__(self):
        """Refuses what no step could meet or violate."""
        check_hyper("max_fraction", self.max_fraction, high=1.0)
        check_hyper("min_scale", self.min_scale, high=1.0)
        check_count("warmup_steps", self.warmup_steps)


@dataclasses.dataclass(frozen=True)
class Policies:
    """The arguments of `guard` that say what a bad step is; see there."""

    nonfinite: bool
    max_norm: Hyper | None
    spike: SpikeRule | None
    watch: tuple[str, ...]
    log_domain: bool
    evidence: ClipEvidence | None

    @property
    def rule(self) -> SpikeRule:
        """The rule of the windows, which are filled even if nobody objects."""
        return SKIP_STEP if self.spike is None else self.spike


class Signals(NamedTuple):
    """What the guard knows of a step.

    Attributes:
      norm: Global norm of the incoming gradients, f32[].
      loss: The loss, f32[]; zero if there is none.
      has_loss: Whether there is one.
    """

    norm: jax.Array
    loss: jax.Array
    has_loss: bool


class Window(NamedTuple):
    """A value's score against its window, and the window with the value in it."""

    z: jax.Array
    is_spike: jax.Array
    after: SpikeMonitorState


class Verdict(NamedTuple):
    """What becomes of a step: bool[] all, but for the index of the first reason."""

    flagged: jax.Array
    skip: jax.Array
    give_up: jax.Array
    reason: jax.Array


def take_signals(updates: Any, loss: Any) -> Signals:
    """Reduces a gradient tree and a loss to the numbers that are judged."""
    # The same operation on the same leaf as in the clippers: compiled once for both.
    leaves = [leaf.value for leaf in clipped_leaves(updates, mask=None, exclude=())]
    squares = [sum_squares(leaf) for leaf in leaves]
    total = jnp.sum(jnp.stack(squares)) if squares else jnp.zeros((), jnp.float32)
    if loss is not None and jnp.shape(loss) != ():
        raise ValueError(
            f"loss must be a scalar, got shape {jnp.shape(loss)}: pass the mean over "
            "the batch, the same on every device."
        )
    value = jnp.asarray(0.0 if loss is None else loss).astype(jnp.float32)
    return Signals(jnp.sqrt(total), value, loss is not None)


def score(
    policies: Policies, value: jax.Array, present: Any, window: SpikeMonitorState
) -> Window:
    """Scores one signal; what is absent has z = 0 and enters no window."""
    if policies.log_domain:
        positive = ~(value <= 0.0)  # NaN is not zero: it has to be seen.
        present, value = present & positive, jnp.log(jnp.where(positive, value, 1.0))
    z, is_spike, after = policies.rule.monitor().update(value, window, present)
    return Window(z, is_spike, after)


def judge(
    policies: Policies,
    signals: Signals,
    norm: Window,
    loss: Window,
    step: jax.Array,
    clip_states: list[ClipState],
) -> jax.Array:
    """One flag per reason, bool[6]; of a policy that is not in force, False."""
    no = jnp.asarray(False)
    flags = dict.fromkeys(REASONS, no)
    if policies.nonfinite:
        flags["nonfinite_grads"] = ~jnp.isfinite(signals.norm)
        flags["nonfinite_loss"] = ~jnp.isfinite(signals.loss)
    if policies.max_norm is not None:
        # A norm that is NaN is not within the limit either.
        flags["max_norm"] = ~(signals.norm <= evaluate(policies.max_norm, step))
    if policies.spike is not None and "norm" in policies.watch:
        flags["norm_spike"] = norm.is_spike
    if policies.spike is not None and "loss" in policies.watch:
        flags["loss_spike"] = loss.is_spike
    if policies.evidence is not None:
        flags["clipping"] = _clips_too_much(policies.evidence, step, clip_states)
    return jnp.stack([flags[reason] for reason in REASONS])


def decide(flags: jax.Array, consecutive: jax.Array, max_consecutive: Any) -> Verdict:
    """Whether a step is skipped, given the flags and the skips in a row before it."""
    limit = evaluate_count(max_consecutive)
    flagged, absolute = jnp.any(flags), jnp.any(flags[:ABSOLUTE])
    return Verdict(
        flagged=flagged,
        skip=absolute | (flagged & (consecutive < limit)),
        give_up=absolute & (consecutive + 1 >= limit),
        reason=jnp.argmax(flags).astype(jnp.int32),
    )


def announce(verdict: Verdict, consecutive: jax.Array, on_give_up: str) -> None:
    """Raises, in one way or the other, if the guard gives up in this step."""
    if on_give_up == "checkify":
        checkify.check(
            ~verdict.give_up,
            "guard gave up after {skips} skipped updates in a row, the last one for "
            f"reason {{reason}} (1 to {len(REASONS)}: {', '.join(REASONS)})",
            skips=consecutive + 1,
            reason=verdict.reason + 1,
        )
    elif on_give_up == "raise":
        # The condition saves the way to the host in all other steps.
        jax.lax.cond(
            verdict.give_up,
            lambda *args: jax.debug.callback(_raise, *args),
            lambda *args: None,
            verdict.give_up,
            consecutive + 1,
            verdict.reason,
        )


def _clips_too_much(
    evidence: ClipEvidence, step: jax.Array, states: list[ClipState]
) -> jax.Array:
    scales = [x for state in states for x in jax.tree.leaves(state.metrics.scale)]
    scale = jnp.concatenate([x.reshape(-1) for x in scales])
    fraction = jnp.mean((scale < 1.0).astype(jnp.float32))
    too_many = fraction > evaluate(evidence.max_fraction, step)
    too_small = jnp.min(scale, initial=1.0) < evaluate(evidence.min_scale, step)
    # These states have counted the update in question already.
    clip_step = jnp.min(jnp.stack([state.clip_step for state in states]))
    is_warm = clip_step > evaluate_count(evidence.warmup_steps)
    return is_warm & (too_many | too_small)


def _raise(give_up: Any, skips: Any, reason: Any) -> None:
    # Under vmap the condition is gone, and the callback runs for all.
    if give_up:
        raise FloatingPointError(
            f"guard gave up after {int(skips)} skipped updates in a row, the last one "
            f"for {REASONS[int(reason)]}"
        )
