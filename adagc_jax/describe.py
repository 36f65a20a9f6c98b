"""A table of which gradients are clipped together, before any of them is there.

Outside the flow of data: it runs the first stations, leaves and groups, on a tree of
parameters, and shows what comes out.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from adagc_jax.groups import Groups
from adagc_jax.kept import KeptAxes, kept_axes
from adagc_jax.leaves import Mask, clipped_leaves, path_name
from adagc_jax.tables import aligned


class GroupRow(NamedTuple):
    """One leaf.

    Attributes:
      path: Such as ``layers/attn/q``.
      shape: Of the leaf.
      stacked: Axes of which each slice is a tensor of its own.
      unit: Axes that index the units of a tensor, as in AGC.
      shards: Into which blocks it is sharded, if every shard is a group: ``1 x 4
        blocks``.
      groups: Into how many groups the leaf falls: 1 for the whole leaf, and for one
        that shares its group with all others; 0 if it is left out.
    """

    path: str
    shape: tuple[int, ...]
    stacked: tuple[int, ...]
    unit: tuple[int, ...]
    shards: str
    groups: int


@dataclasses.dataclass(frozen=True)
class GroupTable:
    """What `describe` found; print it.

    Attributes:
      rows: One for every leaf, in the tree's order.
      whole: Whether all leaves that are not left out form one group together.
    """

    rows: tuple[GroupRow, ...]
    whole: bool

    @property
    def total(self) -> int:
        """Number of groups."""
        count = sum(row.groups for row in self.rows)
        return min(count, 1) if self.whole else count

    def __str__(self) -> str:
        """The table as text, with totals in the last line."""
        head = ("leaf", "shape", "kept axes", "groups")
        lines = aligned([head, *(self._cells(row) for row in self.rows)])
        clipped = sum(row.groups > 0 for row in self.rows)
        left_out = len(self.rows) - clipped
        more = f", {left_out} left out" if left_out else ""
        return "\n".join([*lines, f"groups: {self.total}, of {clipped} leaves{more}"])

    def _cells(self, row: GroupRow) -> tuple[str, str, str, str]:
        units = [f"{axis} (unit)" for axis in row.unit]
        shards = [f"shards {row.shards}"] if row.shards else []
        axes = ", ".join([*map(str, row.stacked), *units, *shards])
        count = "shared" if self.whole else str(row.groups)
        return row.path, str(row.shape), axes or "-", count if row.groups else "-"


def describe(
    groups: Groups,
    params: Any,
    *,
    mask: Mask = None,
    exclude: Sequence[str] = (),
) -> GroupTable:
    """The groups that a spec makes of a tree: path, shape, kept axes, number of groups.

    Args:
      groups: A group spec, such as ``stacked({"layers/": 0})``.
      params: The parameters or gradients; abstract ones and boxed ones will do.
      mask: As in `clip_by_rule`.
      exclude: As in `clip_by_rule`.

    Returns:
      A `GroupTable`: ``print`` it, or read its ``rows`` and ``total``. Masked and
      excluded leaves, and those that are no floating-point arrays, are in it with no
      group.

    Raises:
      ValueError: for something other than a group spec, or a spec or a mask that does
        not fit the tree.

    Example:
      >>> import adagc_jax, jax.numpy as jnp
      >>> layers = {"b": jnp.ones((4, 8)), "w": jnp.ones((4, 8, 8))}
      >>> params = {"layers": layers, "out": jnp.ones((8, 2)), "step": 0}
      >>> print(adagc_jax.describe(adagc_jax.stacked({"layers/": 0}), params))
      leaf      shape      kept axes  groups
      layers/b  (4, 8)     0          4
      layers/w  (4, 8, 8)  0          4
      out       (8, 2)     -          1
      step      ()         -          -
      groups: 9, of 3 leaves, 1 left out
    """
    if not isinstance(groups, Groups):
        raise ValueError(
            f"groups must be a group spec, got {groups!r}. Make one of axes by "
            f"stacked, such as stacked({{'layers/': 0}}), and give params second."
        )
    leaves = clipped_leaves(params, mask, exclude)
    unsharded = dataclasses.replace(groups, shards=None)
    kept = {
        leaf.position: both
        for leaf, *both in zip(
            leaves,
            kept_axes(unsharded, params, leaves),
            kept_axes(groups, params, leaves),
            strict=True,
        )
    }
    with_path, _ = jax.tree_util.tree_flatten_with_path(params)
    rows = [
        _row(path_name(key_path), jnp.shape(value), *kept.get(position, (None, None)))
        for position, (key_path, value) in enumerate(with_path)
    ]
    return GroupTable(tuple(rows), whole=groups.whole)


def _row(
    path: str, shape: tuple[int, ...], axes: KeptAxes | None, seen: KeptAxes | None
) -> GroupRow:
    """A leaf with its own kept axes, and with those of the shards it is seen as."""
    if axes is None or seen is None:
        return GroupRow(path, shape, (), (), "", 0)
    split = shape if seen.view is None else seen.view.shape
    return GroupRow(
        path,
        shape,
        axes.stacked,
        axes.unit,
        "" if seen.view is None else seen.view.name,
        groups=math.prod(split[axis] for axis in seen.all),
    )
