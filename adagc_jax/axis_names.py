"""Axis names that frameworks have put on parameters, read without importing any.

Metadata are known by what they look like: Linen boxes have ``names`` and ``unbox``, NNX
variables have metadata with one of the entries in `NNX_ENTRIES`. Module `derived` makes
group specs of them.
"""

from typing import Any

import jax

from adagc_jax.leaves import path_name

# Newest first: releases of Flax have called it differently.
NNX_ENTRIES = ("out_sharding", "sharding_names", "sharding")

AxisNames = tuple[Any, ...]


def names_by_path(tree: Any) -> dict[str, AxisNames]:
    """The axis names of all leaves that carry any, by path."""
    nodes, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: _axis_names(node) is not None
    )
    return {
        path_name(key_path + inner): names
        for key_path, node in nodes
        if (names := _axis_names(node)) is not None
        for inner, _ in jax.tree_util.tree_flatten_with_path(node)[0]
    }


def has_variables(tree: Any) -> bool:
    """Whether there are NNX variables in a tree, with axis names or without."""

    def is_variable(node: Any) -> bool:
        return hasattr(node, "get_metadata")

    return any(map(is_variable, jax.tree.leaves(tree, is_leaf=is_variable)))


def _axis_names(node: Any) -> AxisNames | None:
    """The axis names of a Linen box or an NNX variable, if it has any."""
    if hasattr(node, "unbox") and hasattr(node, "names"):
        return tuple(node.names)
    if not hasattr(node, "get_metadata"):
        return None
    metadata = node.get_metadata()
    found = next((metadata[e] for e in NNX_ENTRIES if metadata.get(e)), None)
    # A format has its names in a sharding, a sharding in a spec.
    found = getattr(found, "sharding", found)
    found = getattr(found, "spec", found)
    return None if found is None else tuple(found)


def words(entry: Any) -> tuple[Any, ...]:
    """The names of one axis: none, one or several."""
    entry = entry if isinstance(entry, tuple) else (entry,)
    return tuple(name for name in entry if name is not None)
