"""Kept axes: what a group spec means for the leaves of a tree."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from adagc_jax.groups import (
    TYPED,
    Axes,
    Groups,
    Patterns,
    Prefix,
    is_axes,
    is_sharding,
)
from adagc_jax.leaves import Leaf, broadcast_prefix, values_by_pattern
from adagc_jax.shards import View, view_of


class KeptAxes(NamedTuple):
    """Kept axes of one leaf, each non-negative and in increasing order.

    With a view, which only shards need, they are axes of the view.
    """

    stacked: tuple[int, ...]
    unit: tuple[int, ...]
    view: View | None = None

    @property
    def all(self) -> tuple[int, ...]:
        """Stacked and unit axes together."""
        return tuple(sorted(self.stacked + self.unit))

    def seen_in(self, view: View | None) -> "KeptAxes":
        """The same axes of a leaf that another rule wants seen as shards."""
        if view is None or self.view is not None:
            return self
        return KeptAxes(view.axes_of(self.stacked), view.axes_of(self.unit), view)


def kept_axes(groups: Groups, tree: Any, leaves: Sequence[Leaf]) -> list[KeptAxes]:
    """The kept axes of every leaf of ``leaves``; a whole-tree group keeps none."""
    if groups.whole or not leaves:
        # Without leaves specs have nothing to fit, as in optax.tree.map_params.
        return [KeptAxes((), ()) for _ in leaves]
    per_stack = _stacked_axes(groups.stack, tree, leaves)
    per_unit = _units(groups.unit, leaves)
    kept = [
        _leaf_axes(leaf, stack, unit, groups.layout)
        for leaf, stack, unit in zip(leaves, per_stack, per_unit, strict=True)
    ]
    if groups.shards is None:
        return kept
    shardings = _shardings(groups.shards, tree, leaves)
    return [
        _by_shard(axes, view_of(leaf, sharding))
        for axes, leaf, sharding in zip(kept, leaves, shardings, strict=True)
    ]


def _stacked_axes(spec: Any, tree: Any, leaves: Sequence[Leaf]) -> list[Any]:
    if isinstance(spec, Patterns):
        return _by_pattern("stacked axes", spec, leaves, default=None)
    if isinstance(spec, Prefix):
        return _by_prefix("stacked axes", spec, tree, leaves, is_axes)
    if callable(spec):
        return [spec(leaf.path, leaf.value) for leaf in leaves]
    return [spec] * len(leaves)


def _shardings(spec: Any, tree: Any, leaves: Sequence[Leaf]) -> list[Any]:
    if spec == TYPED:
        return [None] * len(leaves)
    return _by_prefix("per_shard(shardings)", spec, tree, leaves, is_sharding)


def _by_shard(kept: KeptAxes, view: View) -> KeptAxes:
    if not view.axes:
        return kept
    stacked = set(view.axes_of(kept.stacked)) | set(view.axes)
    return KeptAxes(tuple(sorted(stacked)), (), view)


def _units(spec: Any, leaves: Sequence[Leaf]) -> list[Any]:
    if isinstance(spec, Patterns):
        return _by_pattern("unit", spec, leaves, default="output")
    return [spec] * len(leaves)


def _by_pattern(
    argument: str, patterns: Patterns, leaves: Sequence[Leaf], default: Any
) -> list[Any]:
    paths = [leaf.path for leaf in leaves]
    return values_by_pattern(argument, patterns.rules, paths, default)


def _by_prefix(
    argument: str,
    prefix: Prefix,
    tree: Any,
    leaves: Sequence[Leaf],
    is_leaf: Callable[[Any], bool],
) -> list[Any]:
    values = jax.tree.unflatten(prefix.treedef, prefix.values)
    every = broadcast_prefix(argument, values, tree, is_leaf)
    return [every[leaf.position] for leaf in leaves]


def _leaf_axes(leaf: Leaf, stack: Axes, unit: Any, layout: str) -> KeptAxes:
    ndim = jax.numpy.ndim(leaf.value)
    stack_axes = _normalised("stacked axes", stack, leaf, ndim)
    if unit == "tensor":
        return KeptAxes(stack_axes, ())
    if unit == "output":
        rest = [axis for axis in range(ndim) if axis not in stack_axes]
        return KeptAxes(stack_axes, _output_axes(rest, layout, leaf))
    unit_axes = _normalised("unit", unit, leaf, ndim)
    if set(unit_axes) & set(stack_axes):
        raise ValueError(
            f"unit axes {unit_axes} of {leaf.path!r} are stacked axes as well "
            f"({stack_axes}): name each axis once."
        )
    return KeptAxes(stack_axes, unit_axes)


def _normalised(argument: str, axes: Axes, leaf: Leaf, ndim: int) -> tuple[int, ...]:
    if not is_axes(axes):
        raise ValueError(
            f"{argument} for {leaf.path!r} must be ints, a tuple of ints or None, "
            f"got {axes!r}."
        )
    wanted = (axes,) if isinstance(axes, int) else axes or ()
    for axis in wanted:
        if not -ndim <= axis < ndim:
            raise ValueError(
                f"{argument}: axis {axis} is out of range for {leaf.path!r} of shape "
                f"{jax.numpy.shape(leaf.value)}. Name the leaves that have it by "
                "pattern, or leave this one out."
            )
    return tuple(sorted({axis % ndim for axis in wanted}))


def _output_axes(axes: list[int], layout: str, leaf: Leaf) -> tuple[int, ...]:
    """The unit axes among ``axes``, the axes of a tensor without its stacked ones."""
    rank = len(axes)
    if rank <= 1:
        return ()
    if layout == "OI":
        return (axes[0],)
    if rank > 5:
        raise ValueError(
            f"unit='output' knows ranks up to 5, but {leaf.path!r} has shape "
            f"{jax.numpy.shape(leaf.value)}: give the unit axes of this leaf."
        )
    return tuple(axes[1:]) if rank <= 3 else (axes[-1],)
