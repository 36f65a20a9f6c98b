"""Packing: how the numbers of all groups are laid out in state.

One number per group would be hundreds of tiny arrays, and a tree of them with the
parameters' structure would inherit each parameter's partition metadata in frameworks
that carry it. So the groups that are whole leaves share one vector, in the order of
the tree, and each leaf with kept axes has an array of its own behind it (left apart,
because concatenating arrays that are sharded along a kept axis moves data).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from adagc_jax.elements import elements
from adagc_jax.manual import varying_axes
from adagc_jax.shards import View, typed

Parts = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Kept axes and group shapes of the leaves of a tree, in the tree's order.

    Attributes:
      paths: Path of each leaf.
      axes: Kept axes of each leaf.
      shapes: Sizes of these axes: one number per group.
      packed: Whether leaves without kept axes share a vector. If not, every leaf is a
        part of its own.
      shards: Which shards of each leaf are groups, in words; "" for a leaf that is
        looked at as a whole, and nothing at all if all are.
    """

    paths: tuple[str, ...]
    axes: tuple[tuple[int, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    packed: bool = True
    shards: tuple[str, ...] = ()

    @property
    def part_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the parts."""
        in_vector, apart = self.places()
        vector = [(len(in_vector),)] if self._has_vector() else []
        return vector + [self.shapes[i] for i in apart]

    def part_shardings(
        self, leaves: Sequence[Any], views: Sequence[View | None]
    ) -> list[NamedSharding | None]:
        """How the parts are sharded, given the leaves they come from."""
        if self == WHOLE:
            return [None]
        _, apart = self.places()
        vector = [None] if self._has_vector() else []
        return vector + [
            kept_sharding(leaves[i], views[i], self.axes[i]) for i in apart
        ]

    def pack(self, values: Sequence[jax.Array]) -> Parts:
        """Puts one value per leaf, of the leaf's group shape, into parts."""
        in_vector, apart = self.places()
        arrays = tuple(values[i] for i in apart)
        if not self._has_vector():
            return arrays
        if not in_vector:
            return (jnp.zeros((0,), jnp.float32),)
        return (jnp.stack([values[i] for i in in_vector]), *arrays)

    def unpack(
        self,
        parts: Parts,
        take: Callable[[jax.Array], list[jax.Array]] = elements,
    ) -> list[jax.Array]:
        """Takes one value per leaf out of the parts; ``take`` gets at the vector."""
        in_vector, apart = self.places()
        values: dict[int, jax.Array] = {}
        if self._has_vector():
            vector, parts = parts[0], parts[1:]
            values = dict(zip(in_vector, take(vector), strict=True))
        values.update(zip(apart, parts, strict=True))
        return [values[i] for i in range(len(self.axes))]

    def varying(self, parts: Parts) -> list[frozenset[str]]:
        """Mesh axes of shard_map along which each leaf's numbers are split."""
        _, apart = self.places()
        arrays = parts[1:] if self._has_vector() else parts
        split = {leaf: varying_axes(x) for leaf, x in zip(apart, arrays, strict=True)}
        return [split.get(leaf, frozenset()) for leaf in range(len(self.axes))]

    def places(self) -> tuple[list[int], list[int]]:
        """Indices of the leaves in the vector and of those apart from it."""
        in_vector = [i for i, axes in enumerate(self.axes) if self.packed and not axes]
        return in_vector, sorted(set(range(len(self.axes))) - set(in_vector))

    def _has_vector(self) -> bool:
        # A tree without leaves has an empty vector, so that its state looks like
        # that of any other tree: optax.tree.map_params relies on it.
        in_vector, apart = self.places()
        return bool(in_vector) or (self.packed and not apart)


WHOLE = Layout(paths=("",), axes=((),), shapes=((),))


def kept_sharding(
    leaf: Any, view: View | None, axes: tuple[int, ...]
) -> NamedSharding | None:
    """Sharding of an array over the kept axes of a leaf, where it is known."""
    if view is not None:
        return view.kept(axes)
    sharding = _sharding(leaf)
    if AxisType.Explicit not in (sharding.mesh.axis_types or ()):
        return None
    # A spec may be shorter than the shape.
    entries = (*typed(sharding).spec, *(None,) * jnp.ndim(leaf))
    return NamedSharding(sharding.mesh, PartitionSpec(*(entries[a] for a in axes)))


def _sharding(leaf: Any) -> Any:
    """As the leaf's type says, and with its devices where it names any."""
    if not isinstance(leaf, jax.core.Tracer):
        own = getattr(leaf, "sharding", None)
        if isinstance(own, NamedSharding) and isinstance(own.mesh, Mesh):
            return own
    return jax.typeof(leaf).sharding


def store(parts: tuple[Any, ...]) -> Any:
    """Parts as a state field.

    A lone vector stands bare, so that the structure of a state is the same for every
    tree whose groups are whole leaves.
    """
    return parts[0] if len(parts) == 1 else parts


def load(field: Any) -> Parts:
    """The parts of a state field."""
    return tuple(jax.tree.leaves(field))


class Labels(tuple):
    """The layouts that name the numbers of a state: a pytree node without leaves.

    It makes a state self-describing at trace time. To serialisers that know named
    tuples it is one without fields. Labels that were lost (by a checkpoint format that
    keeps arrays only) or never known (in the placeholder tree of
    ``optax.tree.map_params``) have no layouts and equal all others, so that they never
    make two states differ in structure; the next update puts them back.
    """

    # Not made by NamedTuple: some look for a direct subclass of tuple with fields.
    _fields: ClassVar[tuple[str, ...]] = ()

    layouts: tuple[Layout, ...]

    def __new__(cls, layouts: tuple[Layout, ...] = ()) -> "Labels":
        """Labels with these layouts, or unknown ones."""
        self = super().__new__(cls)
        self.layouts = layouts
        return self

    def _asdict(self) -> dict[str, Any]:
        return {}

    def __repr__(self) -> str:
        return f"Labels({sum(len(layout.paths) for layout in self.layouts[:1])} leaves)"


class _Known:
    """Layouts as static data of a tree structure; unknown ones equal all others."""

    def __init__(self, layouts: tuple[Layout, ...]):
        self.layouts = layouts

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Known):
            return NotImplemented
        unknown = not self.layouts or not other.layouts
        return unknown or self.layouts == other.layouts

    def __hash__(self) -> int:
        return hash(_Known)


jax.tree_util.register_pytree_node(
    Labels,
    lambda labels: ((), _Known(labels.layouts)),
    lambda known, _: Labels(known.layouts),
)
