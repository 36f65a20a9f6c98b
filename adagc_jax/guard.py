"""The guard: around a whole optimizer, it decides whether a step takes place.

    gradients, loss --> signals --> policies --> verdict
         |                                          |
         +--> inner optimizer --> updates, state --select--> updates, GuardState

The inner optimizer always runs. A skipped step throws its results away: updates are
zeros, and every number of its state stays as it was, bit for bit.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import optax

from adagc_jax.checks import (
    Hyper,
    check_choice,
    check_count,
    check_hyper,
    check_state_type,
)
from adagc_jax.guard_policies import (
    SKIP_STEP as SKIP_STEP,
    ClipEvidence as ClipEvidence,
    Policies,
    announce,
    decide,
    judge,
    score,
    take_signals,
)
from adagc_jax.guard_state import (
    GuardState as GuardState,
    emit_nothing_if,
    freeze_if,
    guard_metrics as guard_metrics,
    new_guard_state,
    tally,
)
from adagc_jax.metrics import find_clip_states
from adagc_jax.spikes import SpikeRule

WATCHABLE = ("norm", "loss")
REMEMBER = ("applied", "all")
ON_GIVE_UP = ("flag", "checkify", "raise")
# An infinite z would be the only number in state that is not finite.
_LARGEST_Z = 1e9


def guard(
    inner: optax.GradientTransformation | optax.MultiSteps,
    *,
    nonfinite: bool = True,
    max_norm: Hyper | None = None,
    spike: SpikeRule | None = None,
    watch: Sequence[str] = WATCHABLE,
    log_domain: bool = False,
    evidence: ClipEvidence | None = None,
    remember: str = "applied",
    max_consecutive: int = 16,
    on_give_up: str = "flag",
) -> optax.GradientTransformationExtraArgs:
    r"""Skips a whole step of an optimizer if something is wrong with it.

    With :math:`n_t` the global norm of the incoming (not yet clipped) gradients and
    :math:`\ell_t` the loss, a step is skipped if

    .. math::
      n_t \notin \mathbb{R},\quad \ell_t \notin \mathbb{R},\quad n_t > c,\quad
      \frac{n_t - m(n)}{s(n)} \ge \sigma,\quad \frac{\ell_t - m(\ell)}{s(\ell)}
      \ge \sigma,

    or the clippers inside clipped too much. :math:`m` and :math:`s` are mean and
    deviation over a window of previous values. A skipped step emits zeros and leaves
    the state of ``inner`` (moments, counters, schedules, :math:`\gamma`) as it was; it
    only counts itself and its reason.

    **Giving up.** After ``max_consecutive`` skips in a row, what only stands out from
    the past (spikes, evidence) is the new normal: such steps take place, and are
    counted as ``accepted``, until one is without objection. A step that is not finite
    or beyond ``max_norm`` never takes place; the guard then gives up as told by
    ``on_give_up``. Everything that touches parameters or state belongs inside: weight
    decay or a schedule outside of the guard would still be applied.

    **With** ``optax.MultiSteps``. ``guard(MultiSteps(inner, k))`` judges micro-batches;
    a bad one is dropped, and its window takes one more. ``MultiSteps(guard(inner), k)``
    judges the average of a window and the loss of its last micro-batch; it needs
    `fresh_windows` around it, or one NaN stays in the accumulator for ever.

    **Memory.** Old and new state are chosen between element by element, which XLA fuses
    into the optimizer on TPU and GPU: no second copy of parameters or state. As with
    any global norm, all gradients must be there before the first parameter changes.
    On CPU, donating the state has XLA copy it in between.

    **With a loss scale.** Unscale first, then guard: the clippers inside then never see
    the scale, and ``guard/last_reason`` tells the loop when to lower it.

    Args:
      inner: The optimizer, clippers included.
      nonfinite: Whether to skip if the norm or the loss is NaN or infinite. Norms above
        1.8e19 count as infinite.
      max_norm: :math:`c`, in the units of the gradient norm. May be a schedule of the
        number of updates seen.
      spike: Window, :math:`\sigma` and so on; ``SKIP_STEP`` is that of OLMo 2: 128
        values, :math:`\sigma = 6`, upwards, from 64 values on. A norm of zero is no
        observation. Windows are filled without it, too, by the rule of ``SKIP_STEP``.
      watch: What ``spike`` is asked about: ``"norm"``, ``"loss"``, or both.
      log_domain: Whether windows hold logarithms. A loss below zero is then no
        observation.
      evidence: See `ClipEvidence`; needs a clipper of this library inside.
      remember: ``"applied"``: only steps that take place enter the windows, so a new
        level is accepted after ``max_consecutive`` steps. ``"all"``: skipped steps
        enter as well, as in OLMo-core, so a new level is accepted after about
        :math:`w / (1 + \sigma^2)` observations in a full window of :math:`w` (4 for
        ``SKIP_STEP``), but one spike widens :math:`s` for the next :math:`w` steps.
        What is not finite never enters.
      max_consecutive: Skips in a row before the guard gives up, at least 1.
      on_give_up: ``"flag"``: ``gave_up`` in the state, for the loop to read (set in any
        case); ``"checkify"``: a ``checkify.check``, for steps under
        ``checkify.checkify``; ``"raise"``: an exception from a host callback, which
        ends the program that the step is in.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` with a `GuardState`. The loss comes
      as ``update(..., loss=...)`` or ``value=...``, a scalar of any float dtype; all
      extra arguments go on to ``inner``. Gradients must be those of the whole batch,
      so that all devices and processes come to one verdict: it holds under ``jit``
      with any sharding, and under ``shard_map`` after the reduction over devices.

    Raises:
      ValueError: for an argument outside its range; from ``init``, if there is evidence
        to take and no clipper; from ``update``, for a loss that is missing (watched by
        ``spike``) or no scalar.

    Example:
      >>> import adagc_jax, jax.numpy as jnp, optax
      >>> optimizer = guard(optax.chain(adagc_jax.global_gc(1.0), optax.sgd(0.1)))
      >>> params = {"w": jnp.ones(2)}
      >>> state = optimizer.init(params)
      >>> grads = {"w": jnp.array([1.0, jnp.nan])}
      >>> updates, state = optimizer.update(grads, state, params, loss=2.0)
      >>> print(params["w"] + updates["w"], guard_metrics(state)["guard/skipped"])
      [1. 1.] 1

    Reference:
      SkipStep of OLMo 2, https://arxiv.org/abs/2501.00656.

    Differs from ``optax.apply_if_finite``: what is not finite is never applied, however
    often it comes. From published ports of SkipStep: NaN does not enter a window, the
    norm is the one before clipping, and the inner optimizer sees the loss as well.
    """
    policies = _policies(nonfinite, max_norm, spike, watch, log_domain, evidence)
    check_choice("remember", remember, REMEMBER)
    check_count("max_consecutive", max_consecutive, low=1)
    check_choice("on_give_up", on_give_up, ON_GIVE_UP)
    inner = _with_extra_args(inner)

    def init_fn(params: optax.Params) -> GuardState:
        inner_state = inner.init(params)
        if evidence is not None and not find_clip_states(inner_state):
            raise ValueError(
                f"evidence is {evidence!r}, but there is no clipper of adagc_jax in "
                "the guarded optimizer: put one in, or leave evidence out."
            )
        return new_guard_state(policies, inner_state)

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, GuardState]:
        check_state_type(state, GuardState)
        signals = take_signals(updates, _find_loss(policies, extra_args))
        updates, new_inner = inner.update(updates, state.inner, params, **extra_args)
        norm = score(policies, signals.norm, signals.norm != 0.0, state.norm_window)
        loss = score(policies, signals.loss, signals.has_loss, state.loss_window)
        clips = find_clip_states(new_inner)
        flags = judge(policies, signals, norm, loss, state.guard_step, clips)
        verdict = decide(flags, state.consecutive, max_consecutive)
        announce(verdict, state.consecutive, on_give_up)
        frozen = verdict.skip if remember == "applied" else jnp.asarray(False)
        new_state = tally(state, verdict)._replace(
            inner=freeze_if(verdict.skip, state.inner, new_inner),
            norm_window=freeze_if(frozen, state.norm_window, norm.after),
            loss_window=freeze_if(frozen, state.loss_window, loss.after),
            norm=jnp.where(jnp.isfinite(signals.norm), signals.norm, state.norm),
            z=jnp.clip(jnp.stack([norm.z, loss.z]), -_LARGEST_Z, _LARGEST_Z),
        )
        return emit_nothing_if(verdict.skip, updates), new_state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _policies(
    nonfinite: bool,
    max_norm: Hyper | None,
    spike: SpikeRule | None,
    watch: Sequence[str],
    log_domain: bool,
    evidence: ClipEvidence | None,
) -> Policies:
    for name, value in (("nonfinite", nonfinite), ("log_domain", log_domain)):
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be a bool, got {value!r}.")
    if max_norm is not None:
        check_hyper("max_norm", max_norm, open_low=True)
    for name, value, kind in (
        ("spike", spike, SpikeRule),
        ("evidence", evidence, ClipEvidence),
    ):
        if not isinstance(value, kind | None):
            raise ValueError(f"{name} must be a {kind.__name__}, got {value!r}.")
    watch = (watch,) if isinstance(watch, str) else tuple(watch)
    if not watch:
        raise ValueError(f"watch must hold one or both of {WATCHABLE}, got {watch!r}.")
    for signal in watch:
        check_choice("watch", signal, WATCHABLE)
    return Policies(nonfinite, max_norm, spike, watch, log_domain, evidence)


def _with_extra_args(inner: Any) -> optax.GradientTransformationExtraArgs:
    if isinstance(inner, optax.MultiSteps):
        # It takes them, but optax cannot tell from its type, and would drop them.
        update: Any = inner.update
        return optax.GradientTransformationExtraArgs(inner.init, update)
    return optax.with_extra_args_support(inner)


def _find_loss(policies: Policies, extra_args: dict[str, Any]) -> Any:
    loss = extra_args.get("loss")
    loss = extra_args.get("value") if loss is None else loss
    if loss is None and policies.spike is not None and "loss" in policies.watch:
        raise ValueError(
            "watch holds 'loss', but update got none: call update(..., loss=loss), or "
            'pass watch="norm" to guard.'
        )
    return loss
