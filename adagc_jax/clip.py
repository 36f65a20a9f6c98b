"""The clipping core: the only init and update of all norm-based methods.

    gradients -> sums of squares -> norms -> rule -> scale -> scaled gradients
                                               |
                                               +--> ClipState

One pass reads the gradients for the sums of squares, one scales them; everything in
between are arrays of one number per group. Several rules may follow one another in the
same pass: each sees the norms that the rules before it have left.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from adagc_jax.checks import check_choice, check_state_type
from adagc_jax.elements import elements, hidden_elements
from adagc_jax.groups import Groups
from adagc_jax.kernels.backend import Backend, as_backend
from adagc_jax.leaves import Mask, params_at
from adagc_jax.manual import AxisNames, check_init, frozen_axis_names
from adagc_jax.norms import scale_leaf
from adagc_jax.observe import observe
from adagc_jax.plan import Plan, Stage, make_plan
from adagc_jax.reduce import Reduce, shards, sums_of_squares
from adagc_jax.rules import Rule
from adagc_jax.shards import from_view, to_view
from adagc_jax.stack_warning import warn_if_stacked
from adagc_jax.stages import Environment, is_local, local_scales, run_stages
from adagc_jax.state import (
    ClipState,
    check_fits,
    init_state,
    split_axes,
)

PHASES = ("auto", "steady")
NONFINITE = ("zero", "skip", "propagate")


def clip_by_rule(
    *rules: Rule | tuple[Rule, Groups],
    groups: Groups | None = None,
    mask: Mask = None,
    exclude: Sequence[str] = (),
    nonfinite: str = "zero",
    phase: str = "auto",
    backend: str | Backend = "auto",
    axis_names: AxisNames = (),
) -> optax.GradientTransformationExtraArgs:
    r"""Clips by any rules, one after another in a single pass over the gradients.

    Every rule turns the norms of its groups into scales,
    :math:`g_i \leftarrow h_i g_i` with :math:`h_i = \mathrm{rule}(\|g_i\|_2)`; the
    next rule sees :math:`h_i \|g_i\|_2`.

    Args:
      *rules: Each a `Rule`, or a pair of a rule and its own groups.
      groups: Groups of the rules that come without; default ``per_tensor()``, with a
        `StackedTreeWarning` for a tree that looks as if its layers were stacked.
      mask: Prefix tree of bools, or a function from the gradient tree to one: leaves
        that are False are handed through bit-identical and count in no norm. (Name a
        function in ``static_args`` of ``optax.inject_hyperparams``, which otherwise
        takes it for a schedule.)
      exclude: Regular expressions searched in paths such as ``layers/0/bias``; leaves
        that match are left out like masked ones.
      nonfinite: What is emitted for a group whose norm is NaN or infinite: ``"zero"``,
        zeros for that group; ``"skip"``, zeros for every group, and no group learns
        from the step; ``"propagate"``, the group as it came. Its own state never moves.
      phase: ``"auto"``, or ``"steady"`` for a program without any norm over the whole
        tree, which a trainer may switch to once a warm-up is over. Both have the same
        state.
      backend: What reads gradients for their norms: ``"auto"``, which is XLA as long
        as no kernel has been measured to win; ``"xla"``; or ``"pallas"``,
        ``"pallas_tpu"``, ``"pallas_gpu"``, a kernel for every leaf that it can serve
        and XLA for the others. Scaling is XLA's, fused with what follows. Gradients
        that are sharded by automatic axes need a `kernels.Backend` that says how;
        `explain` shows which leaf goes where, and why.
      axis_names: Inside ``jax.shard_map``: the mesh axes over which gradients are
        sharded, so that norms are those of whole arrays. A leaf is summed over those
        that it varies over, so a replicated one counts once, and not over those along
        which the state, by its ``in_specs``, is split: these split stacked or unit axes
        (`state_specs` makes the specs). With ``check_vma=False`` types do not say what
        varies, and without names norms would silently be those of the shards: map path
        patterns to the axes to sum over, and leave kept axes unsharded. Gradients must
        have been averaged over data-parallel axes.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` with a `ClipState`. Emitted leaves
      have the dtype of the incoming ones.

    Raises:
      ValueError: for a bad argument, a tree that does not fit the groups or state, or
        a named kernel that can serve no leaf.

    Example:
      >>> import adagc_jax, jax.numpy as jnp
      >>> clip = adagc_jax.clip_by_rule(
      ...     (adagc_jax.FixedNorm(2.0), adagc_jax.per_tensor()),
      ...     (adagc_jax.FixedNorm(1.0), adagc_jax.whole_tree()),
      ... )
      >>> grads = {"a": jnp.array([3.0, 4.0])}
      >>> clip.update(grads, clip.init(grads))[0]
      {'a': Array([0.6, 0.8], dtype=float32)}

    Reference:
      The per-tensor form is that of AdaGC, https://arxiv.org/abs/2502.11034.
    """
    stages = _as_stages(rules, Groups(stack=None) if groups is None else groups)
    check_choice("nonfinite", nonfinite, NONFINITE)
    check_choice("phase", phase, PHASES)
    reduce = Reduce(as_backend(backend), frozen_axis_names(axis_names))
    plan_for = functools.partial(
        make_plan, all_groups=[s.groups for s in stages], mask=mask, exclude=exclude
    )

    def init_fn(params: optax.Params) -> ClipState:
        plan, flat = plan_for(params), jax.tree.leaves(params)
        leaves = [flat[i] for i in plan.positions]
        if any(s.groups.stack is None and not s.groups.whole for s in stages):
            warn_if_stacked(plan.base.paths, [jnp.shape(leaf) for leaf in leaves])
        check_init(shards(plan, leaves), reduce.axis_names)
        return init_state(plan, stages, leaves)

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ClipState]:
        del extra_args
        check_state_type(state, ClipState)
        plan = plan_for(updates)
        check_fits(plan, state)
        env = Environment(state.clip_step, nonfinite, steady=phase == "steady")
        return _update(plan, stages, updates, state, params, env, reduce)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _as_stages(
    rules: Sequence[Rule | tuple[Rule, Groups]], groups: Groups
) -> list[Stage]:
    if not isinstance(groups, Groups):
        raise ValueError(
            "groups must come from per_tensor(), whole_tree(), stacked(...), "
            f"units(...) or per_shard(...), got {groups!r}: wrap axes such as "
            "{'layers/': 0} in stacked(...)."
        )
    pairs = [rule if isinstance(rule, tuple) else (rule, groups) for rule in rules]
    for pair in pairs:
        kinds = len(pair) == 2 and isinstance(pair[0], Rule)
        if not (kinds and isinstance(pair[1], Groups)):
            raise ValueError(
                "rules must be Rule objects or (Rule, Groups) pairs, such as "
                f"(FixedNorm(1.0), whole_tree()), got {pair!r}."
            )
    if not pairs:
        raise ValueError("rules is empty: give at least one Rule, such as FixedNorm()")
    return [Stage(*pair) for pair in pairs]


def _update(
    plan: Plan,
    stages: Sequence[Stage],
    updates: optax.Updates,
    state: ClipState,
    params: optax.Params | None,
    env: Environment,
    reduce: Reduce,
) -> tuple[optax.Updates, ClipState]:
    flat, treedef = jax.tree.flatten(updates)
    originals = [flat[position] for position in plan.positions]
    leaves = [to_view(x, v) for x, v in zip(originals, plan.views, strict=True)]
    split = split_axes(plan, state)
    squares = sums_of_squares(plan, leaves, split, reduce)
    weights = _weights(plan, stages, originals, params)
    param_squares = None
    if weights is not None:
        param_squares = sums_of_squares(plan, weights, split, reduce)

    new_state, scales = settle(plan, stages, state, squares, param_squares, env)
    for position, leaf, axes, scale, view in zip(
        plan.positions, leaves, plan.base.axes, scales, plan.views, strict=True
    ):
        shape = jnp.shape(flat[position])
        flat[position] = from_view(scaled(leaf, axes, scale), view, shape)
    return jax.tree.unflatten(treedef, flat), new_state


def settle(
    plan: Plan,
    stages: Sequence[Stage],
    state: ClipState,
    squares: list[jax.Array],
    param_squares: list[jax.Array] | None,
    env: Environment,
) -> tuple[ClipState, Sequence[jax.Array]]:
    """All of an update but its reads and writes: the next state, a scale per leaf."""
    before = plan.base.pack(squares)
    run = run_stages(plan, stages, state.stages, before, param_squares, env)
    if plan.positions and is_local(stages, env):
        scales = local_scales(plan, stages, state.stages, squares, param_squares, env)
    else:
        whole = all(stage.groups.whole for stage in stages)
        scales = plan.base.unpack(run.scale, elements if whole else hidden_elements)
    new_state = ClipState(
        clip_step=jnp.asarray(optax.safe_increment(state.clip_step)),
        stages=run.states,
        metrics=observe(plan, state.metrics, before, run),
        labels=plan.labels if plan.labels.layouts else state.labels,
    )
    return new_state, scales


def scaled(leaf: jax.Array, axes: tuple[int, ...], scale: jax.Array) -> jax.Array:
    """A leaf times its scale, which has its kept axes only."""
    # A scalar broadcasts by itself; reshaping it would only add operations.
    scale = jnp.expand_dims(scale, _other_axes(leaf, axes)) if axes else scale
    return scale_leaf(leaf, scale)


def _weights(
    plan: Plan,
    stages: Sequence[Stage],
    leaves: Sequence[Any],
    params: optax.Params | None,
) -> list[jax.Array] | None:
    """The parameters of the clipped leaves, if a rule needs them."""
    needy = [type(s.rule).__name__ for s in stages if s.rule.needs_params]
    if not needy:
        return None
    if not plan.positions:
        return []
    if params is None:
        raise ValueError(
            f"{needy[0]} compares gradients with parameters, but params is None: "
            "call update(updates, state, params)."
        )
    weights = params_at(params, plan.base.paths, leaves)
    return [to_view(x, v) for x, v in zip(weights, plan.views, strict=True)]


def _other_axes(leaf: jax.Array, kept: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axis for axis in range(leaf.ndim) if axis not in kept)
