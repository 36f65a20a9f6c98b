"""Which leaves of a gradient tree are clipped, and what they are called.

First station of the flow of data: a tree goes in, the clipped leaves come out with
their paths, and everything else (masked, integer, float0, empty or non-array
leaves) is kept aside to be handed through untouched.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any
Mask = PyTree | Callable[[PyTree], PyTree] | None


class Leaf(NamedTuple):
    """One clipped leaf: its position in the flattened tree, path and value."""

    position: int
    path: str
    value: Any


def path_name(key_path: tuple[Any, ...]) -> str:
    """``layers/0/kernel``: the keys of a path joined by slashes.

    A trailing ``.value`` is dropped: Flax boxes (``nnx.Param``, ``nn.Partitioned``)
    add it, and it is not part of the name that people give a parameter.
    """
    if key_path and key_path[-1] == jax.tree_util.GetAttrKey("value"):
        key_path = key_path[:-1]
    return jax.tree_util.keystr(key_path, simple=True, separator="/")


def clipped_leaves(tree: PyTree, mask: Mask, exclude: Sequence[str]) -> list[Leaf]:
    """The leaves of ``tree`` that are clipped, in the tree's own order."""
    with_path, _ = jax.tree_util.tree_flatten_with_path(tree)
    chosen = _mask_leaves(tree, mask)
    paths = [path_name(key_path) for key_path, _ in with_path]
    left_out = _matches(paths, exclude)
    return [
        Leaf(position, path, value)
        for position, (path, (_, value)) in enumerate(
            zip(paths, with_path, strict=True)
        )
        if chosen[position] and not left_out[position] and _can_be_clipped(value)
    ]


def params_at(params: PyTree, paths: Sequence[str], grads: Sequence[Any]) -> list[Any]:
    """The parameters at ``paths``, which belong to the gradients ``grads``."""
    with_path, _ = jax.tree_util.tree_flatten_with_path(params)
    by_path = {path_name(key_path): value for key_path, value in with_path}
    for path, grad in zip(paths, grads, strict=True):
        if path not in by_path:
            raise ValueError(
                f"params has no leaf {path!r}, but the gradients have one: pass the "
                "parameters that the gradients belong to."
            )
        if jnp.shape(by_path[path]) != jnp.shape(grad):
            raise ValueError(
                f"params leaf {path!r} has shape {jnp.shape(by_path[path])}, its "
                f"gradient {jnp.shape(grad)}: pass the parameters that the gradients "
                "belong to."
            )
    return [by_path[path] for path in paths]


def first_match(path: str, patterns: Sequence[str]) -> int | None:
    """Index of the first regular expression found in ``path`` (``re.search``)."""
    hits = (i for i, pattern in enumerate(patterns) if re.search(pattern, path))
    return next(hits, None)


def check_patterns_used(
    argument: str, patterns: Sequence[str], paths: Sequence[str]
) -> None:
    """Refuses a pattern that matches nothing: it is a typo that would go unseen."""
    for pattern in patterns:
        if paths and not any(re.search(pattern, path) for path in paths):
            shown = ", ".join(paths[:5]) + (", ..." if len(paths) > 5 else "")
            raise ValueError(
                f"{argument}: the pattern {pattern!r} matches no leaf. Patterns are "
                f"regular expressions searched in paths such as {shown}."
            )


def values_by_pattern(
    argument: str,
    rules: Sequence[tuple[str, Any]],
    paths: Sequence[str],
    default: Any,
) -> list[Any]:
    """For every path the value of the first pattern found in it, or the default."""
    patterns = [pattern for pattern, _ in rules]
    check_patterns_used(argument, patterns, paths)
    hits = [first_match(path, patterns) for path in paths]
    return [default if hit is None else rules[hit][1] for hit in hits]


def broadcast_prefix(
    argument: str, prefix: PyTree, tree: PyTree, is_leaf: Callable[[Any], bool]
) -> list[Any]:
    """One value of ``prefix`` for every leaf of ``tree``."""
    try:
        full = jax.tree.broadcast(prefix, tree, is_leaf=is_leaf)
    except ValueError as error:
        raise ValueError(
            f"{argument} is not a prefix of the gradient tree: {error}"
        ) from error
    return jax.tree.structure(tree).flatten_up_to(full)


def _mask_leaves(tree: PyTree, mask: Mask) -> list[bool]:
    count = len(jax.tree.leaves(tree))
    if mask is None or count == 0:
        # Without leaves there is nothing to fit, as in optax.tree.map_params.
        return [True] * count
    mask = mask(tree) if callable(mask) else mask
    chosen = broadcast_prefix("mask", mask, tree, lambda x: x is None)
    for value in chosen:
        if not isinstance(value, bool | np.bool_):
            raise ValueError(
                f"mask must hold Python bools, got {value!r}: True clips a leaf, "
                "False hands it through."
            )
    return [bool(value) for value in chosen]


def _matches(paths: list[str], patterns: Sequence[str]) -> list[bool]:
    check_patterns_used("exclude", patterns, paths)
    return [first_match(path, patterns) is not None for path in paths]


def _can_be_clipped(value: Any) -> bool:
    if isinstance(value, float | complex):
        return True
    dtype = getattr(value, "dtype", None)
    # float0 marks integer inputs of jax.grad; it is a void dtype, not inexact.
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact) and value.size > 0
