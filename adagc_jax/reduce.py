"""Reads the leaves of a plan: sums of squares, by XLA or kernels, over shards.

clip -> sums_of_squares -> norms.sum_squares, or kernels -> sum_over_shards
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from adagc_jax.groups import Patterns
from adagc_jax.kernels.backend import Backend
from adagc_jax.kernels.multi import by_kernels
from adagc_jax.kernels.routes import Asked
from adagc_jax.manual import Shard, sum_over_shards
from adagc_jax.norms import sum_squares
from adagc_jax.plan import Plan
from adagc_jax.shards import place
from adagc_jax.state import Split


class Reduce(NamedTuple):
    """How sums of squares are taken: by what, and over which mesh axes."""

    backend: Backend
    axis_names: tuple[str, ...] | Patterns


def sums_of_squares(
    plan: Plan,
    leaves: Sequence[Any],
    split: Split,
    reduce: Reduce,
    known: dict[int, jax.Array] | None = None,
) -> list[jax.Array]:
    """For every leaf the sums over all axes but those of the finest groups.

    Those of some leaves may be ``known``, by position; then XLA sums the others.
    """
    axes_of, views = plan.base.axes, plan.views
    done = by_kernels(asked(plan, leaves), reduce.backend) if known is None else known
    squares = [
        done[i]
        if i in done
        else place(sum_squares(x, axes), view.kept(axes) if view else None)
        for i, (x, axes, view) in enumerate(zip(leaves, axes_of, views, strict=True))
    ]
    return sum_over_shards(squares, shards(plan, leaves, split), reduce.axis_names)


def asked(plan: Plan, leaves: Sequence[Any]) -> list[Asked]:
    """What kernels are asked to sum."""
    grids = [view is not None for view in plan.views]
    return list(map(Asked, plan.base.paths, leaves, plan.base.axes, grids))


def shards(
    plan: Plan, leaves: Sequence[Any], split: Split | None = None
) -> list[Shard]:
    """What `sum_over_shards` must know of the leaves."""
    base = plan.base
    split = split or [frozenset()] * len(leaves)
    kept = [bool(axes) for axes in base.axes]
    return list(map(Shard, leaves, base.paths, kept, split))
