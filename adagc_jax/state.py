"""The state of a clipping transformation, and how a rule's part of it is packed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from adagc_jax.elements import hidden_elements
from adagc_jax.layout import Labels, Layout, Parts, load, store
from adagc_jax.plan import Plan, Stage
from adagc_jax.rules import Rule
from adagc_jax.shards import place

# Names of mesh axes for every leaf.
Split = list[frozenset[str]]


class StageState(NamedTuple):
    """State of one rule over its groups.

    Attributes:
      seen: Active observations so far, i32, packed. A group was active in an update
        if its norm was finite and not zero.
      rule: The rule's own state; every field f32 or i32, packed like ``seen``.
    """

    seen: Any
    rule: Any


class ClipMetrics(NamedTuple):
    """What the last update did, and counts over all updates, per tensor or slice.

    Attributes:
      norm_before: Norm of the incoming gradient, f32.
      norm_after: Norm of the emitted gradient, f32.
      scale: Factor between them, f32; the smallest one of a tensor's units, and 0 in
        an update that dropped it for a non-finite norm, its own or another's.
      clipped: Updates that clipped it, f32; a tensor with units counts the fraction
        of its units. Being dropped is not being clipped.
      clipped_in_a_row: Active updates since the last one that did not clip, i32.
      active: Updates with a finite gradient that was neither zero nor dropped, i32.
      nonfinite: Updates with a NaN or infinite norm, i32.
      norm_seen: The norm over the whole tree that a rule of the last update worked
        with, f32[]; 0 if none needed it. (Those of the tensors give it up to rounding.)
    """

    norm_before: Any
    norm_after: Any
    scale: Any
    clipped: Any
    clipped_in_a_row: Any
    active: Any
    nonfinite: Any
    norm_seen: Float[Array, ""]


class ClipState(NamedTuple):
    """State of a clipping transformation: small, packed, float32 and int32.

    Attributes:
      clip_step: Updates made, i32[].
      stages: One `StageState` per rule.
      metrics: What the clipper did.
      labels: The names of all of these numbers; holds no arrays.
    """

    clip_step: jax.Array
    stages: tuple[StageState, ...]
    metrics: ClipMetrics
    labels: Labels


def init_state(plan: Plan, stages: Sequence[Stage], leaves: Sequence[Any]) -> ClipState:
    """The state before the first update of ``leaves``, the parameters."""

    def placed(layout: Layout, parts: Parts) -> Any:
        shardings = layout.part_shardings(leaves, plan.views)
        return store(tuple(map(place, parts, shardings)))

    def full(layout: Layout, value: float, dtype: Any) -> Any:
        shapes = layout.part_shapes
        return placed(layout, tuple(jnp.full(s, value, dtype) for s in shapes))

    def init_stage(stage: Stage, layout: Layout) -> StageState:
        structure = rule_structure(stage.rule)
        parts = [stage.rule.init(shape) for shape in layout.part_shapes]
        fields = structure.flatten_up_to(join_rule_states(stage.rule, parts))
        return StageState(
            seen=full(layout, 0, jnp.int32),
            rule=structure.unflatten([placed(layout, load(f)) for f in fields]),
        )

    report = plan.report.coarse
    return ClipState(
        clip_step=jnp.zeros((), jnp.int32),
        stages=tuple(
            init_stage(s, p.coarse) for s, p in zip(stages, plan.stages, strict=True)
        ),
        metrics=ClipMetrics(
            norm_before=full(report, 0.0, jnp.float32),
            norm_after=full(report, 0.0, jnp.float32),
            scale=full(report, 1.0, jnp.float32),
            clipped=full(report, 0.0, jnp.float32),
            clipped_in_a_row=full(report, 0, jnp.int32),
            active=full(report, 0, jnp.int32),
            nonfinite=full(report, 0, jnp.int32),
            norm_seen=jnp.zeros((), jnp.float32),
        ),
        labels=plan.labels,
    )


def split_axes(plan: Plan, state: ClipState) -> Split:
    """Mesh axes of shard_map along which the kept axes of each leaf are split.

    The types of the gradients do not say which of their dimensions an axis splits;
    those of the state, which has kept axes only, do.
    """
    fields = [(plan.report.coarse, state.metrics.norm_before)]
    fields += [
        (regroup.coarse, stage.seen)
        for regroup, stage in zip(plan.stages, state.stages, strict=True)
        if not regroup.whole
    ]
    per_field = [layout.varying(load(field)) for layout, field in fields]
    return [frozenset().union(*leaf) for leaf in zip(*per_field, strict=True)]


def rule_structure(rule: Rule) -> Any:
    """Structure of a rule's state; its leaves are the fields that hold parts."""
    return jax.tree.structure(rule.init(()))


def split_rule_state(rule: Rule, state: Any, count: int) -> list[Any]:
    """A rule's state, whose fields hold parts, as one state per part."""
    treedef = rule_structure(rule)
    fields = [load(field) for field in treedef.flatten_up_to(state)]
    return [treedef.unflatten([f[part] for f in fields]) for part in range(count)]


def join_rule_states(rule: Rule, states: list[Any]) -> Any:
    """The inverse of `split_rule_state`."""
    treedef = rule_structure(rule)
    fields = zip(*(treedef.flatten_up_to(state) for state in states), strict=True)
    return treedef.unflatten([store(tuple(field)) for field in fields])


def unpack_stage(stage: Stage, layout: Layout, state: StageState) -> StageState:
    """The same state with a part for every leaf, as in `Plan.apart`."""
    treedef = rule_structure(stage.rule)
    fields = treedef.flatten_up_to(state.rule)
    seen, *unpacked = (
        tuple(layout.unpack(load(field), hidden_elements))
        for field in (state.seen, *fields)
    )
    return StageState(seen=seen, rule=treedef.unflatten(unpacked))


def check_fits(plan: Plan, state: ClipState) -> None:
    """Refuses a gradient tree other than the one that the state was made for."""
    was, now = state.labels.layouts, plan.labels.layouts
    if was and now and was != now:
        _refuse(was[0], now[0])
    shapes = [part.shape for part in load(state.metrics.norm_before)]
    if shapes != plan.report.coarse.part_shapes:
        raise ValueError(
            f"The clipping state has numbers of shapes {shapes}, but the gradient tree "
            f"makes groups of shapes {plan.report.coarse.part_shapes}: call init with "
            "parameters of the same structure and groups."
        )


def _refuse(was: Layout, now: Layout) -> None:
    missing = sorted(set(was.paths) - set(now.paths))
    added = sorted(set(now.paths) - set(was.paths))
    regrouped = [
        f"{path} has groups of shape {shape}, had {was.shapes[was.paths.index(path)]}"
        for path, shape in zip(now.paths, now.shapes, strict=True)
        if path in was.paths and shape != was.shapes[was.paths.index(path)]
    ]
    if not (missing or added or regrouped):
        _refuse_shards(was, now)
    raise ValueError(
        "The gradient tree does not fit the clipping state that init made: "
        f"missing leaves: {missing[:5] or 'none'}; new leaves: {added[:5] or 'none'}; "
        f"regrouped: {regrouped[:5] or 'none'}. Call init with parameters of the same "
        "structure and groups, or mask the leaves that come and go."
    )


def _refuse_shards(was: Layout, now: Layout) -> None:
    whole = ("",) * len(now.paths)
    shards = zip(now.paths, was.shards or whole, now.shards or whole, strict=True)
    for path, old, new in shards:
        if old != new:
            raise ValueError(
                f"The clipping state has a reference for every shard of {path!r} as "
                f"{old or 'one block'}, and the gradient is {new or 'one block'}: "
                "per_shard references belong to one mesh. Keep the rest of the state "
                "and start them afresh with adagc_jax.transfer_state, or call init."
            )
