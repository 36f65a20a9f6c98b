"""The scan axis of the leaves below a path, checked against their sizes.

A helper of `derived`, whose `stacked_scan` turns the axes into a group spec.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from adagc_jax.groups import stacked
from adagc_jax.kept import kept_axes
from adagc_jax.leaves import Leaf

_SHOWN = 8


def check_scan_axis(axis: Any) -> None:
    """Refuses anything but one int: sizes are compared on one axis."""
    if not isinstance(axis, int) or isinstance(axis, bool):
        raise ValueError(
            f"axis must be one int, the axis of the layers, got {axis!r}. Further "
            "stacked axes, such as those of experts, are given by "
            "also={'a pattern of their paths': 0}."
        )


def rest_below(path: str, segments: str) -> str:
    """What follows ``segments`` in a path, empty if they are not in it."""
    return f"/{path}".partition(f"/{segments.strip('/')}/")[2]


def scan_axes(
    below: Sequence[Leaf], segments: str, axis: int, leaves: Sequence[Leaf]
) -> dict[str, tuple[int, ...]]:
    """The scan axis of the leaves ``below`` a path, if all agree on its size."""
    if not below:
        shown = ", ".join(leaf.path for leaf in leaves[:5])
        raise ValueError(
            f"under: no leaf is below {segments!r}. The tree has {shown or 'no leaf'}"
            f"{', ...' if len(leaves) > 5 else ''}."
        )
    for leaf in below:
        if rest_below(leaf.path, segments).split("/")[0].isdigit():
            raise ValueError(
                f"under: {leaf.path!r} is in a list of layers, which are not stacked: "
                "leave groups out, each of them is a tensor of its own."
            )
    kept = kept_axes(stacked(axis), None, below)
    sizes = {
        leaf.path: jnp.shape(leaf.value)[k.stacked[0]]
        for leaf, k in zip(below, kept, strict=True)
    }
    if len(set(sizes.values())) > 1:
        _refuse_sizes(sizes, segments, axis)
    return {leaf.path: k.stacked for leaf, k in zip(below, kept, strict=True)}


def _refuse_sizes(sizes: Mapping[str, int], segments: str, axis: int) -> None:
    stacks: dict[str, set[int]] = {}
    for path, size in sizes.items():
        start = path.removesuffix(rest_below(path, segments)).rstrip("/")
        stacks.setdefault(start, set()).add(size)
    if len(stacks) > 1 and all(len(found) == 1 for found in stacks.values()):
        depths = {start: size for start, (size,) in stacks.items()}
        raise ValueError(
            f"axis {axis} has not one size below {segments!r}, but one in each of "
            f"{depths}: name stacks of different depth apart, under={tuple(stacks)!r}."
        )
    raise ValueError(
        f"axis {axis} cannot be the scan axis below {segments!r}: sizes differ, "
        f"{dict(list(sizes.items())[:_SHOWN])}. Name the axis that has one size."
    )
