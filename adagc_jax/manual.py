"""Norms inside ``shard_map``: which mesh axes a leaf's squares are summed over.

Under ``jit`` a gradient is whole, however it is sharded, and the compiler sums over its
shards. Inside ``jax.shard_map`` the library sees one shard. The type of a value says
over which mesh axes it varies: a shard varies over the axes it is split along, a
replicated leaf over none, so it is counted once. What the type cannot say is meant by a
variation: a gradient that was not averaged over the data-parallel axis varies too.
Hence the axes must be named. Nor can it say which dimension an axis splits: that the
experts of a stack are split over one, and not their rows, is read off the state, whose
numbers of experts are split likewise.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from adagc_jax.groups import Patterns
from adagc_jax.leaves import values_by_pattern

AxisNames = str | Sequence[str] | Mapping[str, str | Sequence[str]]


def frozen_axis_names(axis_names: AxisNames | None) -> tuple[str, ...] | Patterns:
    """The argument ``axis_names``, checked and hashable."""
    if axis_names is None:
        return ()
    if isinstance(axis_names, Mapping):
        return Patterns(tuple((k, _names(v)) for k, v in axis_names.items()))
    return _names(axis_names)


class Shard(NamedTuple):
    """What is known of one leaf.

    Attributes:
      value: The gradient or parameter: one shard of it.
      path: Its path.
      kept: Whether it has kept axes.
      split: Mesh axes along which these are split, as the types of the state say.
    """

    value: Any
    path: str
    kept: bool
    split: frozenset[str]


def sum_over_shards(
    squares: Sequence[jax.Array],
    shards: Sequence[Shard],
    axis_names: tuple[str, ...] | Patterns,
) -> list[jax.Array]:
    """Sums of squares of whole leaves from those of this device's shards."""
    return summed_over(squares, axes_to_sum(shards, axis_names))


def axes_to_sum(
    shards: Sequence[Shard], axis_names: tuple[str, ...] | Patterns
) -> list[tuple[str, ...]]:
    """For every leaf the mesh axes that its squares are summed over; none outside."""
    if not manual_axes():
        _refuse_outside(axis_names)
        return [()] * len(shards)
    named = _named(axis_names, [shard.path for shard in shards])
    if _types_tell():
        exact = isinstance(axis_names, Patterns)
        named = [_reduced(*pair, exact) for pair in zip(shards, named, strict=True)]
    return named


def summed_over(
    values: Sequence[jax.Array], axes_of: Sequence[tuple[str, ...]]
) -> list[jax.Array]:
    """Each value summed over its own mesh axes, none for an empty tuple."""
    result = list(values)
    for axes in dict.fromkeys(filter(None, axes_of)):
        places = [i for i, own in enumerate(axes_of) if own == axes]
        # One call for all of them: the compiler makes it one collective.
        sums = jax.lax.psum([values[i] for i in places], axes)
        for i, total in zip(places, sums, strict=True):
            result[i] = total
    return result


def check_init(shards: Sequence[Shard], axis_names: tuple[str, ...] | Patterns) -> None:
    """Refuses to make a state inside shard_map that could be split or not."""
    if not manual_axes() or not _types_tell():
        return
    named = _named(axis_names, [shard.path for shard in shards])
    for shard, names in zip(shards, named, strict=True):
        varying = varying_axes(shard.value)
        exact = isinstance(axis_names, Patterns) and varying <= set(names)
        if shard.kept and varying and not exact:
            raise ValueError(
                f"init inside shard_map: {shard.path!r} varies over {sorted(varying)}, "
                "and whether its groups are split over them cannot be seen. Call init "
                "outside and pass the state with in_specs (see state_specs), or map "
                "path patterns to the axes to sum over in axis_names."
            )


def pooled(
    value: jax.Array, reduce: Any = jnp.sum, keep: frozenset[str] = frozenset()
) -> jax.Array:
    """A number reduced over the mesh axes that it still varies over.

    After `sum_over_shards` these are the axes along which kept axes are split; those of
    them that the result is split along as well are in ``keep``. Types must tell: with
    ``check_vma=False`` nothing is known to vary, and kept axes must not be split.
    """
    axes = tuple(sorted(varying_axes(value) - keep))
    return _ACROSS[reduce](value, axes) if axes else value


def _any_across(value: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.psum(value.astype(jnp.int32), axes) > 0


_ACROSS = {
    jnp.sum: jax.lax.psum,
    jnp.mean: jax.lax.pmean,
    jnp.min: jax.lax.pmin,
    jnp.any: _any_across,
}


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
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, tuple | list) or not all(
        isinstance(name, str) for name in names
    ):
        raise ValueError(
            "axis_names must be names of mesh axes, or a mapping from path patterns to "
            f"them, such as ('fsdp', 'tensor'), got {value!r}."
        )
    return tuple(names)


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
        named = values_by_pattern("axis_names", axis_names.rules, paths, default=())
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


def _reduced(shard: Shard, named: tuple[str, ...], exact: bool) -> tuple[str, ...]:
    """The axes to sum over for one leaf."""
    varying = varying_axes(shard.value)
    both = sorted(shard.split & set(named))
    if exact and both:
        raise ValueError(
            f"axis_names: {shard.path!r} is to be summed over {both}, but the state's "
            "groups of it are split over them. Name only the axes that its other "
            "dimensions are sharded over."
        )
    if rest := sorted(varying - set(named) - shard.split):
        raise ValueError(
            f"The gradient of {shard.path!r} varies over the mesh axes {rest} of "
            "shard_map, which axis_names does not name. If it is sharded over them, "
            f"pass axis_names={tuple(sorted(varying - shard.split))!r}; if they are "
            "data-parallel, average the gradient over them first (jax.lax.pmean); if "
            "its stacked axes are, split the state likewise (see state_specs)."
        )
    summed = varying & set(named) - shard.split
    return tuple(name for name in manual_axes() if name in summed)


def _types_tell() -> bool:
    """Whether types carry varying axes here (``check_vma=True``)."""
    axes = manual_axes()
    return bool(varying_axes(jax.lax.axis_index(axes[0])))


def _shown(axis_names: tuple[str, ...] | Patterns) -> str:
    rules = axis_names.rules if isinstance(axis_names, Patterns) else None
    return repr(axis_names if rules is None else dict(rules))
