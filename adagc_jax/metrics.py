"""Reads what the clipper did out of any optimizer state, as named scalars.

Everything is there already, computed in the update from norms that it needs anyway:
reading costs no pass over gradients, no reduction over devices and no host sync.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adagc_jax.checks import check_choice
from adagc_jax.layout import WHOLE, Layout, Parts, load
from adagc_jax.leaves import clipped_leaves
from adagc_jax.state import ClipMetrics, ClipState

Scalars = dict[str, jax.Array]


def clip_metrics(
    opt_state: Any, params: Any = None, *, level: str = "totals", prefix: str = "clip"
) -> Scalars:
    r"""Named scalars of the last update and counts of all updates.

    Totals, with :math:`n_i` the norm of tensor :math:`i`:
    ``norm_before`` and ``norm_after`` are :math:`\sqrt{\sum_i n_i^2}` of the incoming
    and emitted gradients, ``fraction_clipped`` the fraction of tensors that the last
    update clipped, ``clip_rate`` the same over all updates, ``min_scale`` the smallest
    scale, ``nonfinite`` the non-finite norms met so far, ``step`` the updates made. In
    a step that a guard skips the clipper's state is frozen, and so are these numbers.

    Args:
      opt_state: Any optimizer state with a clipper in it, at any depth: chains, masks,
        partitions, ``MultiSteps``, ``inject_hyperparams``, ``nnx.Optimizer.opt_state``.
        Several clippers are merged if they clip different leaves; otherwise they are
        numbered in the order of the state: ``clip/0/norm_before``.
      params: The parameters. Only used for a state that came out of a checkpoint
        format that keeps no names and has not been updated since, and then enough
        unless it has stacked groups or masked leaves.
      level: ``"totals"``, or ``"all"`` for the numbers of every tensor as well:
        ``clip/<path>/norm_before``, ``norm_after``, ``scale``, ``clip_rate``,
        ``clipped_in_a_row``, ``active``, ``nonfinite``, and the rule's own, such as
        ``gamma``. Slices of stacked tensors are named one by one: ``layers/q[3]``.
      prefix: First part of every name.

    Returns:
      A flat dict from names to f32[] or i32[] arrays. Works under ``jit``.

    Raises:
      ValueError: if there is no clipping state in ``opt_state``, or it has lost its
        names and ``params`` do not give them back.

    Example:
      >>> import adagc_jax, jax.numpy as jnp
      >>> clip = adagc_jax.tensor_gc(1.0)
      >>> grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([0.5])}
      >>> _, state = clip.update(grads, clip.init(grads))
      >>> metrics = adagc_jax.clip_metrics(state, level="all")
      >>> print(metrics["clip/fraction_clipped"], metrics["clip/a/norm_before"])
      0.5 5.0

    Reference:
      The diagnostics of AdaGC, https://arxiv.org/abs/2502.11034.
    """
    check_choice("level", level, ("totals", "all"))
    states = find_clip_states(opt_state)
    if not states:
        raise ValueError(
            "opt_state holds no clipping state. Put a clipper of adagc_jax into the "
            "optimizer, or pass the state of the optimizer that has one."
        )
    layouts = [_layouts(state, params) for state in states]
    scalars: Scalars = {}
    for start, members in _reports(prefix, [layout[0].paths for layout in layouts]):
        merged = [states[member] for member in members]
        scalars |= {f"{start}/{k}": v for k, v in _totals(merged).items()}
        for member in members:
            named = _named(states[member], layouts[member], everything=level == "all")
            scalars |= {f"{start}/{k}": v for k, v in named.items()}
    return scalars


def find_clip_states(opt_state: Any) -> list[ClipState]:
    """All clipping states inside an optimizer state, in its order."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, ClipState))
    return [node for node in nodes if isinstance(node, ClipState)]


def _reports(prefix: str, paths: list[tuple[str, ...]]) -> list[tuple[str, list[int]]]:
    """Which clippers are reported together, and under which prefix."""
    everyone = list(range(len(paths)))
    if len({path for group in paths for path in group}) == sum(map(len, paths)):
        return [(prefix, everyone)]
    return [(f"{prefix}/{number}", [number]) for number in everyone]


def _layouts(state: ClipState, params: Any) -> tuple[Layout, ...]:
    """The state's own layouts, or those that the parameters suggest."""
    if state.labels.layouts:
        return state.labels.layouts
    parts = load(state.metrics.norm_before)
    leaves = clipped_leaves(params, mask=None, exclude=())
    if len(parts) != 1 or parts[0].shape != (len(leaves),):
        raise ValueError(
            "opt_state has lost the names of its tensors (a checkpoint format kept "
            f"arrays only), and params, which have {len(leaves)} leaves, do not give "
            "them back: make one update first."
        )
    paths = tuple(leaf.path for leaf in leaves)
    report = Layout(paths, axes=((),) * len(paths), shapes=((),) * len(paths))
    is_whole = [load(s.seen)[0].shape != (len(paths),) for s in state.stages]
    stages = [WHOLE if whole else report for whole in is_whole]
    return (report, *stages)


def _totals(states: list[ClipState]) -> Scalars:
    def pooled(field: str) -> jax.Array:
        parts = [p for s in states for p in load(getattr(s.metrics, field))]
        return jnp.concatenate([part.reshape(-1) for part in parts])

    scale, active = pooled("scale"), pooled("active")
    # A scale of zero is that of a group dropped for a non-finite norm.
    clipped = (scale < 1.0) & (scale > 0.0)
    return {
        "norm_before": jnp.sqrt(jnp.sum(jnp.square(pooled("norm_before")))),
        "norm_after": jnp.sqrt(jnp.sum(jnp.square(pooled("norm_after")))),
        "fraction_clipped": _rate(jnp.sum(clipped.astype(jnp.float32)), clipped.size),
        "clip_rate": _rate(jnp.sum(pooled("clipped")), jnp.sum(active)),
        "min_scale": jnp.min(scale, initial=1.0),
        "nonfinite": jnp.sum(pooled("nonfinite"), dtype=jnp.int32),
        "step": states[0].clip_step,
    }


def _named(
    state: ClipState, layouts: tuple[Layout, ...], *, everything: bool
) -> Scalars:
    """Numbers of the rules over the whole tree and, if wanted, of every tensor."""
    report, *per_stage = layouts
    columns = _columns(state.metrics) if everything else {}
    scalars: Scalars = {}
    for layout, stage in zip(per_stage, state.stages, strict=True):
        fields = getattr(stage.rule, "_asdict", dict)()
        if layout == WHOLE:
            scalars |= {name: load(field)[0][0] for name, field in fields.items()}
        elif everything and layout == report:
            columns |= fields
    for name, field in columns.items():
        for path, value in _by_path(report, load(field)):
            scalars[f"{path}/{name}"] = value
    return scalars


def _columns(metrics: ClipMetrics) -> dict[str, Any]:
    columns = metrics._asdict()
    clipped = zip(load(columns.pop("clipped")), load(metrics.active), strict=True)
    return columns | {"clip_rate": tuple(_rate(c, a) for c, a in clipped)}


def _rate(clipped: jax.Array, active: jax.Array | int) -> jax.Array:
    return clipped / jnp.maximum(active, 1).astype(jnp.float32)


def _by_path(layout: Layout, parts: Parts) -> Iterator[tuple[str, jax.Array]]:
    """Every number with its name: ``path``, or ``path[layer,expert]``."""
    for path, shape, values in zip(
        layout.paths, layout.shapes, layout.unpack(parts), strict=True
    ):
        for index in np.ndindex(*shape):
            name = f"{path}[{','.join(map(str, index))}]" if shape else path
            yield name, values[index]
