"""Stacked groups read off a tree: from the names of its axes, or from a scan axis.

Before the flow of data begins: a parameter tree goes in, a `Groups` spec that knows the
stacked axes of every leaf by its path comes out.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from adagc_jax.axis_names import AxisNames, has_variables, names_by_path, words
from adagc_jax.groups import Axes, Groups, stacked
from adagc_jax.kept import kept_axes
from adagc_jax.leaves import Leaf, clipped_leaves, first_match
from adagc_jax.scan_axes import check_scan_axis, rest_below, scan_axes

STACK_NAMES = ("layers", "experts")


@dataclasses.dataclass(frozen=True)
class AxesByPath:
    """The stacked axes of every leaf of one tree, as a function for `stacked`.

    It refuses a leaf that it does not know: paths that have changed would otherwise
    turn stacked leaves into unstacked ones without a word.
    """

    axes: tuple[tuple[str, tuple[int, ...]], ...]

    def __call__(self, path: str, leaf: Any) -> tuple[int, ...]:
        """The stacked axes of the leaf at ``path``."""
        del leaf
        if path not in self._table:
            known = ", ".join([path for path, _ in self.axes[:5]]) or "no leaf"
            raise ValueError(
                f"groups were derived from a tree without a leaf {path!r} (it had "
                f"{known}{', ...' if len(self.axes) > 5 else ''}): derive them from "
                "the tree that the optimizer gets."
            )
        return self._table[path]

    @functools.cached_property
    def _table(self) -> dict[str, tuple[int, ...]]:
        return dict(self.axes)


def stacked_from_metadata(
    tree: Any,
    names: Sequence[str] = STACK_NAMES,
    unnamed: Mapping[str, Axes] | None = None,
) -> Groups:
    """Stacked axes by the names that Flax has given to the axes of parameters.

    An axis is stacked if its name is one of ``names``. ``nn.scan`` and ``nn.vmap`` add
    the name in ``metadata_params={nn.PARTITION_NAME: "layers"}`` to ``nn.Partitioned``
    and ``nn.LogicallyPartitioned`` boxes; ``nnx.vmap`` and ``nnx.scan`` add the one in
    ``transform_metadata={nnx.PARTITION_NAME: "layers"}`` to the sharding names of a
    variable. Both leave parameters alone that were made without names.

    Args:
      tree: Boxed Linen variables, or an NNX state, of arrays or abstract ones: the
        tree that the optimizer gets (for Linen usually ``variables["params"]``). The
        groups work on the same tree without boxes, too.
      names: Names of stacked axes. Each must be on some axis; of the default names,
        one must be.
      unnamed: Stacked axes of leaves that carry no names, by regular expressions
        searched in their paths, as in `stacked`; ``None`` as an axis says that a leaf
        is not stacked.

    Returns:
      A group spec for this tree; leaves may be masked, but not renamed.

    Raises:
      ValueError: if a name is on no axis, a leaf has more names than axes, a pattern
        matches no unnamed leaf, or an unnamed leaf looks like the stacked ones next to
        it and no pattern speaks of it.

    Example:
      >>> import adagc_jax, jax
      >>> from flax import linen as nn
      >>> w = jax.ShapeDtypeStruct((8, 4, 16), "float32")
      >>> params = {"mlp": nn.Partitioned(w, names=("embed", "layers", "mlp"))}
      >>> groups = adagc_jax.stacked_from_metadata(params)
      >>> groups.stack.axes
      (('mlp', (1,)),)
    """
    leaves, carried = clipped_leaves(tree, mask=None, exclude=()), names_by_path(tree)
    _check_names(names, tree, carried, leaves)
    axes = {
        leaf.path: _named_axes(leaf, carried[leaf.path], names)
        for leaf in leaves
        if leaf.path in carried
    }
    rest = [leaf for leaf in leaves if leaf.path not in carried]
    told = _pattern_axes("unnamed", unnamed, rest)
    _check_neighbours(
        [leaf for leaf in rest if first_match(leaf.path, list(unnamed or ())) is None],
        [(leaf, axes[leaf.path]) for leaf in leaves if axes.get(leaf.path)],
    )
    return _by_path(leaves, axes | told)


def stacked_scan(
    tree: Any,
    axis: int = 1,
    under: str | Sequence[str] = "layers",
    also: Mapping[str, Axes] | None = None,
) -> Groups:
    """One scan axis for all leaves below a path, as in MaxText's ``param_scan_axis``.

    Unlike ``stacked({"layers/": 1})`` it looks at the tree: all leaves below the path
    must have the same size on the axis, so that a wrong axis is seen and not clipped.

    Args:
      tree: The parameters, arrays or abstract ones, boxed or not.
      axis: The axis of the layers, ``config.param_scan_axis`` in MaxText.
      under: Segments of the path below which leaves are stacked, ``"layers"`` or
        ``"decoder/layers"``; or several, each with its own number of layers, such as
        ``("dense_layers", "moe_layers")``.
      also: Further stacked axes by regular expressions searched in paths, in addition
        to the scan axis: ``{"MoeBlock": 0}`` for experts stacked on axis 0.

    Returns:
      A group spec for this tree; leaves may be masked, but not renamed.

    Raises:
      ValueError: for several axes, if no leaf is below the path, leaves below it differ
        in size on the axis or lack it, layers there are listed by number, or a pattern
        of ``also`` matches nothing.

    Example:
      >>> import adagc_jax, jax.numpy as jnp
      >>> layers = {"kernel": jnp.ones((8, 4, 16)), "bias": jnp.ones((16, 4))}
      >>> params = {"decoder": {"layers": layers}, "embed": jnp.ones((32, 8))}
      >>> groups = adagc_jax.stacked_scan(params, axis=1)
      >>> groups == adagc_jax.stacked_scan(params, axis=1, under="decoder/layers")
      True
    """
    check_scan_axis(axis)
    leaves = clipped_leaves(tree, mask=None, exclude=())
    scanned: dict[str, tuple[int, ...]] = {}
    for segments in [under] if isinstance(under, str) else under:
        below = [leaf for leaf in leaves if rest_below(leaf.path, segments)]
        scanned |= scan_axes(below, segments, axis, leaves)
    more = _pattern_axes("also", also, leaves)
    both = {
        leaf.path: tuple(sorted({*scanned.get(leaf.path, ()), *more[leaf.path]}))
        for leaf in leaves
    }
    return _by_path(leaves, both)


def _by_path(leaves: Sequence[Leaf], axes: Mapping[str, tuple[int, ...]]) -> Groups:
    return stacked(AxesByPath(tuple((leaf.path, axes[leaf.path]) for leaf in leaves)))


def _check_names(
    names: Sequence[str],
    tree: Any,
    carried: Mapping[str, AxisNames],
    leaves: Sequence[Leaf],
) -> None:
    if isinstance(names, str):
        raise ValueError(f"names must be a sequence of names, got the str {names!r}.")
    axes = [carried[leaf.path] for leaf in leaves if leaf.path in carried]
    there = {word for entries in axes for entry in entries for word in words(entry)}
    missing = [name for name in names if name not in there]
    if missing and (tuple(names) != STACK_NAMES or len(missing) == len(names)):
        none = (
            "none: its variables were made without any. Say yourself which axes are "
            "stacked, with stacked_scan(tree, axis, under) or stacked({'layers/': 0})"
            if has_variables(tree)
            else "none: pass the boxed variables or the NNX state, not bare arrays, or "
            "say which axes are stacked with stacked_scan or stacked"
        )
        raise ValueError(
            f"names: no axis of the tree is called {' or '.join(map(repr, missing))}. "
            f"Names on its axes: {', '.join(sorted(map(repr, there))) or none}."
        )


def _named_axes(
    leaf: Leaf, carried: AxisNames, names: Sequence[str]
) -> tuple[int, ...]:
    if len(carried) > jnp.ndim(leaf.value):
        raise ValueError(
            f"{leaf.path!r} has the axis names {carried}, but the shape "
            f"{jnp.shape(leaf.value)}: its metadata belong to another array."
        )
    return tuple(i for i, entry in enumerate(carried) if {*words(entry)} & {*names})


def _pattern_axes(
    argument: str, patterns: Mapping[str, Axes] | None, leaves: Sequence[Leaf]
) -> dict[str, tuple[int, ...]]:
    """Axes of ``leaves`` by pattern; none where no pattern matches."""
    if patterns and not leaves:
        raise ValueError(f"{argument}={patterns!r}, but there is no leaf for it.")
    try:
        kept = kept_axes(stacked(patterns or {}), None, leaves)
    except ValueError as error:
        raise ValueError(f"{argument}: {error}") from error
    return {leaf.path: k.stacked for leaf, k in zip(leaves, kept, strict=True)}


def _check_neighbours(
    unnamed: Sequence[Leaf], named: Sequence[tuple[Leaf, tuple[int, ...]]]
) -> None:
    """Refuses leaves without names that may well be stacked like those next to them."""
    both = [(leaf, _neighbourly_axes(leaf, named)) for leaf in unnamed]
    doubtful = [(leaf, axes) for leaf, axes in both if axes]
    if doubtful:
        first, _ = doubtful[0]
        raise ValueError(
            f"{len(doubtful)} leaves without axis names lie next to stacked ones and "
            f"have their sizes: {first.path!r} of shape {jnp.shape(first.value)} may "
            "be stacked as well. Say by patterns which axes of these leaves are, or "
            f"None: unnamed={ {leaf.path: axes for leaf, axes in doubtful[:8]} }."
        )


def _neighbourly_axes(
    leaf: Leaf, named: Sequence[tuple[Leaf, tuple[int, ...]]]
) -> tuple[int, ...]:
    """Axes of ``leaf`` stacked in its nearest neighbours and of the same size here."""
    shape = jnp.shape(leaf.value)
    folders = leaf.path.split("/")[:-1]
    for depth in range(len(folders), -1, -1):
        start = "".join(f"{folder}/" for folder in folders[:depth])
        near = [(n, axes) for n, axes in named if n.path.startswith(start)]
        if near:
            sizes = {(a, jnp.shape(n.value)[a]) for n, axes in near for a in axes}
            return tuple(i for i, size in enumerate(shape) if (i, size) in sizes)
    return ()
