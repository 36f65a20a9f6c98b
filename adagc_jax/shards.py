"""Shards as groups: each leaf seen as the grid of blocks that the devices hold.

A leaf ``[R, C]`` sharded ``P("fsdp", "tensor")`` on a 4 x 2 mesh is viewed as
``[4, R/4, 2, C/2]``; keeping axes 0 and 2 makes one group of each block. Sums over
blocks need no communication, and the references, ``[4, 2]``, live where the blocks do.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from adagc_jax.leaves import Leaf
from adagc_jax.manual import manual_axes


class View(NamedTuple):
    """A leaf as a grid of shards.

    Attributes:
      shape: With every split dimension as a pair: number of shards, size of each.
      axes: Those that number the shards.
      dimensions: The axes that each dimension of the leaf has become.
      sharding: Of the leaf.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    dimensions: tuple[tuple[int, ...], ...]
    sharding: NamedSharding

    @property
    def name(self) -> str:
        """Into which blocks the leaf is divided, for messages and comparison."""
        counts = [str(self.shape[d[0]]) if len(d) > 1 else "1" for d in self.dimensions]
        return " x ".join(counts) + " blocks"

    @property
    def spec(self) -> PartitionSpec:
        """How the view is sharded: along the axes that number the shards."""
        split = iter(_split_entries(self.sharding))
        ranks = range(len(self.shape))
        return PartitionSpec(*(next(split) if a in self.axes else None for a in ranks))

    def kept(self, axes: tuple[int, ...]) -> NamedSharding:
        """Sharding of an array over these axes of the view."""
        entries = [self.spec[axis] for axis in axes]
        return NamedSharding(self.sharding.mesh, PartitionSpec(*entries))

    def axes_of(self, dimensions: tuple[int, ...]) -> tuple[int, ...]:
        """The axes that these dimensions of the leaf have become."""
        return tuple(axis for d in dimensions for axis in self.dimensions[d])


def view_of(leaf: Leaf, sharding: Any) -> View:
    """The view of a leaf sharded so, or as its type says if ``sharding`` is None."""
    if manual_axes():
        raise ValueError(
            f"per_shard: {leaf.path!r} is one shard already, inside shard_map. Use "
            "per_shard under jit, outside shard_map."
        )
    sharding = _typed_sharding(leaf) if sharding is None else sharding
    if not isinstance(sharding, NamedSharding):
        raise ValueError(
            f"per_shard: the sharding of {leaf.path!r} must be a "
            f"jax.sharding.NamedSharding, got {sharding!r}."
        )
    size = jnp.shape(leaf.value)
    counts = _counts(sharding, len(size))
    shape, axes, dimensions = [], [], []
    for dimension, (length, count) in enumerate(zip(size, counts, strict=True)):
        if length % count:
            raise ValueError(
                f"per_shard: dimension {dimension} of {leaf.path!r}, of shape {size}, "
                f"is not divisible into the {count} shards of {sharding.spec}."
            )
        pair = (count, length // count) if count > 1 else (length,)
        axes += [len(shape)] if count > 1 else []
        dimensions.append(tuple(range(len(shape), len(shape) + len(pair))))
        shape += pair
    return View(tuple(shape), tuple(axes), tuple(dimensions), sharding)


def to_view(x: Any, view: View | None) -> jax.Array:
    """The leaf as its grid of shards; as it is without a view."""
    if view is None:
        return jnp.asarray(x)
    return _reshape(x, view.shape, NamedSharding(view.sharding.mesh, view.spec))


def from_view(x: jax.Array, view: View | None, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `to_view`."""
    return x if view is None else _reshape(x, shape, view.sharding)


def place(x: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    """``x`` with this sharding, if one is known."""
    if sharding is None:
        return x
    if isinstance(sharding.mesh, Mesh) and not isinstance(x, jax.core.Tracer):
        return jax.device_put(x, sharding)
    if _is_explicit(sharding):
        return jax.sharding.reshard(x, typed(sharding))
    return jax.lax.with_sharding_constraint(x, sharding)


def typed(sharding: NamedSharding) -> NamedSharding:
    """The part of a sharding that types carry: its explicit axes."""
    mesh = sharding.mesh
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))

    def explicit(entry: Any) -> bool:
        return all(kinds[name] == AxisType.Explicit for name in _names(entry))

    spec = (entry if explicit(entry) else None for entry in sharding.spec)
    return NamedSharding(mesh, PartitionSpec(*spec))


def _reshape(x: Any, shape: Sequence[int], sharding: NamedSharding) -> jax.Array:
    if _is_explicit(sharding):
        return jax.lax.reshape(x, shape, out_sharding=typed(sharding))
    return jax.lax.with_sharding_constraint(jnp.reshape(x, shape), sharding)


def _is_explicit(sharding: NamedSharding) -> bool:
    return AxisType.Explicit in sharding.mesh.axis_types


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _typed_sharding(leaf: Leaf) -> NamedSharding:
    sharding = jax.typeof(leaf.value).sharding
    if AxisType.Explicit not in (sharding.mesh.axis_types or ()):
        raise ValueError(
            f"per_shard: how {leaf.path!r} is sharded cannot be seen under jit with "
            "automatic axes. Pass the shardings of the parameters: "
            "per_shard(jax.tree.map(lambda p: p.sharding, params))."
        )
    return sharding


def _counts(sharding: NamedSharding, rank: int) -> list[int]:
    entries = [*sharding.spec, *[None] * (rank - len(sharding.spec))]
    return [_count(sharding, entry) for entry in entries[:rank]]


def _count(sharding: NamedSharding, entry: Any) -> int:
    if entry is PartitionSpec.UNCONSTRAINED:
        raise ValueError(
            f"per_shard: the sharding {sharding.spec} leaves an axis unconstrained: "
            "give a mesh axis or None for every dimension."
        )
    return math.prod(sharding.mesh.shape[name] for name in _names(entry))


def _split_entries(sharding: NamedSharding) -> list[Any]:
    return [entry for entry in sharding.spec if _count(sharding, entry) > 1]
