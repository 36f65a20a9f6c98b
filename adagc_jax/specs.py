"""How an optimizer's state is sharded, for those who have to say it.

Under ``jit`` nobody has to. ``jax.shard_map`` wants specs of the state, and so does
whoever restores a checkpoint onto a mesh.
"""

from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from adagc_jax.layout import WHOLE, Layout, load, store
from adagc_jax.leaves import path_name
from adagc_jax.state import ClipState, StageState


def state_specs(
    optimizer: optax.GradientTransformation, params: Any, specs: Any
) -> Any:
    """Partition specs of an optimizer state, from those of the parameters.

    What is shaped like a parameter (Adam's moments) is sharded like it. A clipper's
    numbers per layer, expert or unit are split along the axes that split these, and
    everything else is replicated.

    Args:
      optimizer: Any optax transformation, with clippers of this library at any depth.
      params: The parameters, or ``jax.ShapeDtypeStruct`` of their whole shapes.
      specs: A ``PartitionSpec`` for every parameter, in a tree like ``params``.

    Returns:
      A tree like ``optimizer.init(params)`` of ``PartitionSpec``: ``in_specs`` and
      ``out_specs`` of ``jax.shard_map``.

    Raises:
      ValueError: for ``specs`` that do not fit ``params``.

    Example:
      >>> import adagc_jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> clip = adagc_jax.adagc(groups=adagc_jax.stacked({"experts": 0}))
      >>> params = {"experts": jnp.ones((4, 8)), "norm": jnp.ones(8)}
      >>> specs = {"experts": P("expert", "fsdp"), "norm": P()}
      >>> state = adagc_jax.state_specs(clip, params, specs)
      >>> [tuple(spec) for spec in state.stages[0].rule.gamma]
      [(), ('expert',)]
    """
    flat = jax.tree_util.tree_flatten_with_path(specs, is_leaf=_is_spec)[0]
    by_path = {path_name(key): spec for key, spec in flat}
    for path, spec in by_path.items():
        if not _is_spec(spec):
            raise ValueError(
                f"specs must hold a PartitionSpec for every parameter, got {spec!r} "
                f"for {path!r}."
            )
    if jax.tree.structure(specs, is_leaf=_is_spec) != jax.tree.structure(params):
        raise ValueError(
            "specs must be a tree like params with a PartitionSpec for every leaf, got "
            f"{jax.tree.structure(specs, is_leaf=_is_spec)} for "
            f"{jax.tree.structure(params)}."
        )
    state = jax.eval_shape(optimizer.init, params)
    mapped = optax.tree.map_params(
        optimizer,
        lambda _, spec: spec,
        state,
        specs,
        transform_non_params=lambda _: PartitionSpec(),
    )
    return jax.tree.map(
        lambda spec, node: _clip_specs(node, by_path) if _is_clip(node) else spec,
        mapped,
        state,
        is_leaf=lambda node: _is_spec(node) or _is_clip(node),
    )


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)


def _is_clip(node: Any) -> bool:
    return isinstance(node, ClipState)


def _clip_specs(state: ClipState, by_path: dict[str, PartitionSpec]) -> ClipState:
    report, *per_stage = state.labels.layouts or (WHOLE,) * (1 + len(state.stages))
    metrics = [_field(report, field, by_path) for field in state.metrics[:-1]]
    return ClipState(
        clip_step=PartitionSpec(),  # type: ignore[arg-type]
        stages=tuple(
            StageState(
                seen=_field(layout, stage.seen, by_path),
                rule=_rule(layout, stage, by_path),
            )
            for layout, stage in zip(per_stage, state.stages, strict=True)
        ),
        metrics=type(state.metrics)(*metrics, norm_seen=PartitionSpec()),  # type: ignore[arg-type]
        labels=state.labels,
    )


def _rule(layout: Layout, stage: StageState, by_path: dict[str, PartitionSpec]) -> Any:
    if not isinstance(stage.rule, tuple) or not hasattr(stage.rule, "_fields"):
        return stage.rule
    return type(stage.rule)(*(_field(layout, f, by_path) for f in stage.rule))


def _field(layout: Layout, field: Any, by_path: dict[str, PartitionSpec]) -> Any:
    """Specs of the parts of a field: the vector's, then those of leaves apart."""
    _, apart = layout.places()
    parts = [_part(layout, leaf, by_path) for leaf in apart]
    vector = [PartitionSpec()] * (len(load(field)) - len(parts))
    return store((*vector, *parts))


def _part(
    layout: Layout, leaf: int, by_path: dict[str, PartitionSpec]
) -> PartitionSpec:
    spec = by_path[layout.paths[leaf]]
    entries = (*spec, *(None,) * (max(layout.axes[leaf]) + 1))
    return PartitionSpec(*(entries[axis] for axis in layout.axes[leaf]))
