"""Norms inside ``shard_map``: which mesh axes a leaf's squares are summed over.

Under ``jit`` a gradient is whole, however it is sharded, and the compiler sums over its
shards. Inside ``jax.shard_map`` the library sees one shard. The type of a value says
over which mesh axes it varies: a shard varies over the axes it is split along, a
replicated leaf over none, so it is counted once. What the type cannot say is meant by a
variation: a gradient that was not averaged over the data-parallel axis varies too.
Hence the axes must be named.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from adagc_jax.groups import Patterns
from adagc_jax.leaves import check_patterns_used, first_match

AxisNames = str | Sequence[str] | Mapping[str, str | Sequence[str]]


def frozen_axis_names(axis_names: AxisNames) -> tuple[str, ...] | Patterns:
    """The argument ``axis_names``, checked and hashable."""
    if isinstance(axis_names, Mapping):
        return Patterns(tuple((k, _names(v)) for k, v in axis_names.items()))
    return _names(axis_names)


def sum_over_shards(
    squares: Sequence[jax.Array],
    leaves: Sequence[Any],
    paths: Sequence[str],
    kept: Sequence[tuple[int, ...]],
    axis_names: tuple[str, ...] | Patterns,
) -> list[jax.Array]:
    """Sums of squares of whole leaves from those of this device's shards."""
    if not manual_axes():
        _refuse_outside(axis_names)
        return list(squares)
    named = _named(axis_names, paths)
    reduced = [
        _reduced_axes(*args) for args in zip(leaves, paths, kept, named, strict=True)
    ]
    result = list(squares)
    for axes in dict.fromkeys(filter(None, reduced)):
        places = [i for i, own in enumerate(reduced) if own == axes]
        # One call for all of them: the compiler makes it one collective.
        sums = jax.lax.psum([squares[i] for i in places], axes)
        for i, total in zip(places, sums, strict=True):
            result[i] = total
    return result


def pooled(value: jax.Array) -> jax.Array:
    """The sum over the mesh axes that a value still varies over.

    After `sum_over_shards` these are the axes along which kept axes are sharded.
    """
    axes = tuple(sorted(varying_axes(value)))
    return jax.lax.psum(value, axes) if axes else value


def manual_axes() -> tuple[str, ...]:
    """Mesh axes of the shard_map that is being traced; none outside."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def varying_axes(value: Any) -> frozenset[str]:
    """Mesh axes over which the value's type says that it varies inside shard_map."""
    aval = jax.typeof(value)
    if hasattr(aval, "vma"):
        return aval.vma
    return aval.manual_axis_type.varying


def _names(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(name, str) for name in names):
        raise ValueError(
            "axis_names must be names of mesh axes, or a mapping from path patterns to "
            f"them, such as ('fsdp', 'tensor'), got {value!r}."
        )
    return names


def _refuse_outside(axis_names: tuple[str, ...] | Patterns) -> None:
    if axis_names not in ((), Patterns(())):
        raise ValueError(
            f"axis_names={_shown(axis_names)} is for use inside jax.shard_map, and "
            "this update is not: leave it out, norms under jit are those of the whole "
            "arrays."
        )


def _named(
    axis_names: tuple[str, ...] | Patterns, paths: Sequence[str]
) -> list[tuple[str, ...]]:
    """The axes named for every leaf."""
    if isinstance(axis_names, Patterns):
        patterns = [pattern for pattern, _ in axis_names.rules]
        check_patterns_used("axis_names", patterns, paths)
        hits = [first_match(path, patterns) for path in paths]
        named = [() if hit is None else axis_names.rules[hit][1] for hit in hits]
    else:
        named = [axis_names] * len(paths)
        if axis_names and not _types_tell():
            raise ValueError(
                f"axis_names={axis_names!r}: under shard_map(check_vma=False) types do "
                "not say which leaves are sharded and which replicated. Use "
                "check_vma=True, or map path patterns to axes, such as "
                "{'norm': (), 'layers/': ('fsdp',)}."
            )
    known = manual_axes()
    for name in sorted({name for names in named for name in names}):
        if name not in known:
            raise ValueError(
                f"axis_names: {name!r} is no mesh axis of this shard_map, which has "
                f"{known}."
            )
    return named


def _reduced_axes(
    leaf: Any, path: str, kept: tuple[int, ...], named: tuple[str, ...]
) -> tuple[str, ...]:
    """The axes to sum over for one leaf."""
    if not _types_tell():
        return named
    varying = varying_axes(leaf)
    rest = sorted(varying - set(named))
    # A leaf with kept axes may vary because these are sharded.
    if rest and not kept:
        raise ValueError(
            f"The gradient of {path!r} varies over the mesh axes {rest} of shard_map, "
            "which axis_names does not name. If it is sharded over them, pass "
            f"axis_names={tuple(sorted(varying))!r}; if they are data-parallel, "
            "average the gradient over them first (jax.lax.pmean)."
        )
    return tuple(name for name in manual_axes() if name in varying & set(named))


def _types_tell() -> bool:
    """Whether types carry varying axes here (``check_vma=True``)."""
    axes = manual_axes()
    return bool(varying_axes(jax.lax.axis_index(axes[0])))


def _shown(axis_names: tuple[str, ...] | Patterns) -> str:
    rules = axis_names.rules if isinstance(axis_names, Patterns) else None
    return repr(axis_names if rules is None else dict(rules))
