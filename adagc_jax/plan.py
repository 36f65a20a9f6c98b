"""The plan of one clipping pass: made from shapes and paths alone, at trace time."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from adagc_jax.groups import Groups
from adagc_jax.kept import KeptAxes, kept_axes
from adagc_jax.layout import WHOLE, Labels, Layout
from adagc_jax.leaves import Leaf, Mask, clipped_leaves
from adagc_jax.manual import manual_axes
from adagc_jax.regroup import Regroup
from adagc_jax.rules import Rule
from adagc_jax.shards import View


class Stage(NamedTuple):
    """A rule and the groups it works on."""

    rule: Rule
    groups: Groups


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which leaves are clipped, and in which groups.

    Attributes:
      positions: Of the clipped leaves in the flattened tree.
      views: How leaves whose shards are groups are looked at; None for the others.
      base: The finest groups: kept axes of all rules together.
      report: The groups of the metrics: stacked axes, but no unit axes.
      stages: The groups of each rule, as regroupings of the finest ones.
    """

    positions: tuple[int, ...]
    views: tuple[View | None, ...]
    base: Layout
    report: Regroup
    stages: tuple[Regroup, ...]

    @property
    def labels(self) -> Labels:
        """Names of the numbers in state: the metrics first, then each rule's.

        Unknown inside shard_map with kept axes, of which it may see a part only.
        """
        if not self.positions or (manual_axes() and any(self.base.axes)):
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
    views = tuple(_view(*leaf) for leaf in zip(leaves, *per_rule, strict=True))
    per_rule = [
        [axes.seen_in(view) for axes, view in zip(kept, views, strict=True)]
        for kept in per_rule
    ]
    by_leaf = list(zip(*per_rule, strict=True))
    layout = functools.partial(_layout, leaves, views)
    base = layout([_union(k.all for k in kept) for kept in by_leaf])
    stacked = [_union(k.stacked for k in kept) for kept in by_leaf]
    return Plan(
        positions=tuple(leaf.position for leaf in leaves),
        views=views,
        base=base,
        report=Regroup(base, layout(stacked)),
        stages=tuple(
            Regroup(base, WHOLE, whole=True)
            if groups.whole
            else Regroup(base, layout([k.all for k in kept]))
            for groups, kept in zip(all_groups, per_rule, strict=True)
        ),
    )


def _view(leaf: Leaf, *kept: KeptAxes) -> View | None:
    """The one view of a leaf that the rules agree on."""
    views = list(dict.fromkeys(k.view for k in kept if k.view is not None))
    if len(views) > 1:
        raise ValueError(
            f"per_shard: two rules see {leaf.path!r} as different shards, "
            f"{views[0].name} and {views[1].name}: give both the same shardings."
        )
    return views[0] if views else None


def _union(axes: Any) -> tuple[int, ...]:
    return tuple(sorted(set().union(*axes)))


def _layout(
    leaves: Sequence[Leaf],
    views: Sequence[View | None],
    axes: Sequence[tuple[int, ...]],
) -> Layout:
    shapes = [
        view.shape if view else jnp.shape(leaf.value)
        for leaf, view in zip(leaves, views, strict=True)
    ]
    return Layout(
        paths=tuple(leaf.path for leaf in leaves),
        axes=tuple(axes),
        shapes=tuple(
            tuple(shape[axis] for axis in kept)
            for shape, kept in zip(shapes, axes, strict=True)
        ),
        shards=tuple(v.name if v else "" for v in views) if any(views) else (),
    )
