"""Makes the arrays of a transferred state: kept ones, mixed ones and new ones.

After `match`, which says where every number comes from. Only what is new is computed:
an array that is carried over as a whole is handed over itself, and of ``init`` no more
is run than the arrays that are missing.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from adagc_jax.restore import names_of
from adagc_jax.transfer_match import Match
from adagc_jax.transfer_records import Record, Slot


class Piece(NamedTuple):
    """Numbers of an array of the new state, and those of the old one, if any."""

    slot: Slot
    source: Slot | None


def find_pieces(
    old: Sequence[Record], new: Sequence[Record], matches: Sequence[Match], count: int
) -> list[list[Piece]]:
    """What each of the ``count`` arrays of the new state is made of."""
    pieces: list[list[Piece]] = [[] for _ in range(count)]
    for m in matches:
        slot = new[m.record].slots[m.key]
        source = None if m.source is None else old[m.source].slots[m.key]
        pieces[slot.leaf].append(Piece(slot, source))
    return pieces


def make_arrays(
    pieces: Sequence[Sequence[Piece]],
    old_state: Any,
    optimizer: Any,
    params: Any,
    target: Any,
) -> list[jax.Array]:
    """The arrays of the new state, whose shapes are those of ``target``."""
    old = [_as_array(leaf) for leaf in jax.tree.leaves(old_state)]
    wholes = [_whole_source(parts, old) for parts in pieces]
    wanted = [number for number, whole in enumerate(wholes) if whole is None]
    fresh = _run_init(optimizer, params, target, wanted, pieces)
    arrays: list[jax.Array] = []
    given: set[int] = set()
    for number, (parts, whole) in enumerate(zip(pieces, wholes, strict=True)):
        if whole is None:
            arrays.append(_mix(fresh[number], old, parts))
        else:
            # The same array twice could not be donated.
            arrays.append(old[whole].copy() if whole in given else old[whole])
            given.add(whole)
    return arrays


def _whole_source(pieces: Sequence[Piece], old: Sequence[jax.Array]) -> int | None:
    """Index of the old array that these pieces are all of, in its order."""
    in_order = [p.source for p in pieces if p.source and p.source.place == p.slot.place]
    if len(in_order) < len(pieces) or len({source.leaf for source in in_order}) != 1:
        return None
    (leaf,) = {source.leaf for source in in_order}
    is_all = in_order[0].place is None or len(in_order) == old[leaf].size
    return leaf if is_all else None


def _run_init(
    optimizer: Any,
    params: Any,
    target: Any,
    wanted: list[int],
    pieces: Sequence[Sequence[Piece]],
) -> dict[int, jax.Array]:
    """The arrays of ``init`` that are wanted, and nothing else of it."""
    if not wanted:
        return {}

    def init(params: Any) -> list[jax.Array]:
        leaves = jax.tree.leaves(optimizer.init(params))
        return [jnp.asarray(leaves[number]) for number in wanted]

    anywhere, where = _placements(params, target, pieces)
    asked = [where[number] for number in wanted]
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params)):
        arrays = jax.jit(lambda: init(params), out_shardings=asked)()
    else:
        arrays = jax.jit(init, out_shardings=asked)(params)
    if anywhere is not None:
        arrays = [
            x if _named_sharding(x) else jax.device_put(x, anywhere) for x in arrays
        ]
    return dict(zip(wanted, arrays, strict=True))


def _placements(
    params: Any, target: Any, pieces: Sequence[Sequence[Piece]]
) -> tuple[NamedSharding | None, list[NamedSharding | None]]:
    """Where arrays go that belong nowhere, and where each new one is asked to go."""
    by_path = {
        names_of(keys): (jnp.shape(leaf), _named_sharding(leaf))
        for keys, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    meshes = [s.mesh for _, s in by_path.values() if s is not None]
    anywhere = NamedSharding(meshes[0], PartitionSpec()) if meshes else None

    def place(names: tuple[str, ...], leaf: Any, slot: Slot) -> NamedSharding | None:
        typed = getattr(leaf.sharding, "spec", PartitionSpec())
        if anywhere is not None and any(typed):
            return NamedSharding(anywhere.mesh, typed)
        if slot.form.groups:
            # Numbers of shards lie where these do: init itself has said so.
            return None if slot.place is None else anywhere
        for start in range(len(names) + 1):
            shape, sharding = by_path.get(names[start:], (None, None))
            if shape == leaf.shape and sharding is not None:
                return sharding
        return anywhere

    leaves = jax.tree_util.tree_leaves_with_path(target)
    return anywhere, [
        place(names_of(keys), leaf, parts[0].slot)
        for (keys, leaf), parts in zip(leaves, pieces, strict=True)
    ]


def _named_sharding(leaf: Any) -> NamedSharding | None:
    sharding = getattr(leaf, "sharding", None)
    on_devices = isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    return sharding if on_devices else None


def _mix(
    fresh: jax.Array, old: Sequence[jax.Array], pieces: Sequence[Piece]
) -> jax.Array:
    """A vector of a clipper: old numbers where there are some, else those of init."""
    moves = [(p.slot.place, p.source) for p in pieces if p.source is not None]
    for leaf in sorted({source.leaf for _, source in moves}):
        is_old = np.zeros(fresh.shape, bool)
        where = np.zeros(fresh.shape, np.int32)
        for place, source in moves:
            if source.leaf == leaf:
                assert source.place is not None
                is_old[place], where[place] = True, source.place
        sharding = _named_sharding(old[leaf])
        if sharding is not None:
            fresh = jax.device_put(fresh, NamedSharding(sharding.mesh, PartitionSpec()))
        fresh = _choose(is_old, where, old[leaf], fresh)
    return fresh


@jax.jit
def _choose(
    is_old: np.ndarray, where: np.ndarray, old: jax.Array, fresh: jax.Array
) -> jax.Array:
    return jnp.where(is_old, old[where], fresh)


def _as_array(leaf: Any) -> jax.Array:
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
