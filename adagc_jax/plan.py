"""The plan of one clipping pass: made from shapes and paths alone, at trace time."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from adagc_jax.groups import Groups, KeptAxes, kept_axes
from adagc_jax.layout import WHOLE, Labels, Layout, Regroup
from adagc_jax.leaves import Leaf, Mask, clipped_leaves
from adagc_jax.rules import Rule


class Stage(NamedTuple):
    """A rule and the groups it works on."""

    rule: Rule
    groups: Groups


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which leaves are clipped, and in which groups.

    Attributes:
      positions: Of the clipped leaves in the flattened tree.
      base: The finest groups: kept axes of all rules together.
      report: The groups of the metrics: stacked axes, but no unit axes.
      stages: The groups of each rule, as regroupings of the finest ones.
    """

    positions: tuple[int, ...]
    base: Layout
    report: Regroup
    stages: tuple[Regroup, ...]

    @property
    def labels(self) -> Labels:
        """Names of the numbers in state: the metrics first, then each rule's."""
        if not self.positions:
            return Labels()
        return Labels((self.report.coarse, *(stage.coarse for stage in self.stages)))

    @property
    def apart(self) -> "Plan":
        """The same plan with a part for every leaf instead of a shared vector."""

        def unpacked(layout: Layout) -> Layout:
            return dataclasses.replace(layout, packed=False)

        base = unpacked(self.base)
        return dataclasses.replace(
            self,
            base=base,
            report=Regroup(base, unpacked(self.report.coarse)),
            stages=tuple(
                Regroup(base, unpacked(s.coarse), s.whole) for s in self.stages
            ),
        )


def make_plan(
    tree: Any, all_groups: Sequence[Groups], mask: Mask, exclude: Sequence[str]
) -> Plan:
    """The plan for a gradient (or parameter) tree."""
    leaves = clipped_leaves(tree, mask, exclude)
    per_rule = [kept_axes(groups, tree, leaves) for groups in all_groups]
    base = _layout(leaves, [_union(k.all for k in kept) for kept in _by_leaf(per_rule)])
    stacked = [_union(k.stacked for k in kept) for kept in _by_leaf(per_rule)]
    return Plan(
        positions=tuple(leaf.position for leaf in leaves),
        base=base,
        report=Regroup(base, _layout(leaves, stacked)),
        stages=tuple(
            Regroup(base, WHOLE, whole=True)
            if groups.whole
            else Regroup(base, _layout(leaves, [k.all for k in kept]))
            for groups, kept in zip(all_groups, per_rule, strict=True)
        ),
    )


def _by_leaf(per_rule: list[list[KeptAxes]]) -> list[tuple[KeptAxes, ...]]:
    return list(zip(*per_rule, strict=True))


def _union(axes: Any) -> tuple[int, ...]:
    return tuple(sorted(set().union(*axes)))


def _layout(leaves: Sequence[Leaf], axes: Sequence[tuple[int, ...]]) -> Layout:
    shapes = [jnp.shape(leaf.value) for leaf in leaves]
    return Layout(
        paths=tuple(leaf.path for leaf in leaves),
        axes=tuple(axes),
        shapes=tuple(
            tuple(shape[axis] for axis in kept)
            for shape, kept in zip(shapes, axes, strict=True)
        ),
    )


def scale_shape(leaf: jax.Array, kept: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in which a leaf's scales broadcast against it."""
    return tuple(
        size if axis in kept else 1 for axis, size in enumerate(jnp.shape(leaf))
    )
