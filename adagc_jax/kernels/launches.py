"""Which arrays one launch of a kernel sums, and in which blocks: without JAX.

    views, bytes -> launches (positions of neighbours) -> on TPU: rings of blocks

Neighbours in the tree stay together, and a launch reads no more than `LAUNCH_BYTES`:
all arrays of one must be there before it starts, so that a launch for a whole tree
would keep every gradient alive until the last is known.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from adagc_jax.kernels.tiling import LANES, MAX_SLICES, MIB, View

# XLA charges two thousand cycles for a launch; reading so much takes many times that.
LAUNCH_BYTES = 64 * MIB
MAX_ARRAYS = 64
# Blocks on their way into VMEM, and how large each may be.
RING = 3
RING_BYTES = MIB // 2
# What the compiler gives a kernel on every TPU, less something for itself.
RINGS_BYTES = 12 * MIB


@dataclasses.dataclass(frozen=True)
class Ring:
    """Buffers that arrays of as many columns and one dtype share."""

    rows: int
    cols: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class Walk:
    """How one array goes through its ring.

    Attributes:
      view: The array as slices, rows and columns.
      rows: Of a block; the last one of a slice may have less.
      ring: Which of the launch's rings.
      first: Place of the first slice among all slices of the launch.
    """

    view: View
    rows: int
    ring: int
    first: int

    @property
    def blocks(self) -> int:
        """Blocks of one slice."""
        return -(-self.view.rows // self.rows)


def gpu_launches(sizes: Sequence[int]) -> list[list[int]]:
    """Positions of the arrays of so many bytes that share each launch."""
    return _packed(sizes, [None] * len(sizes), lambda _: True)


def tpu_launches(views: Sequence[View], itemsizes: Sequence[int]) -> list[list[int]]:
    """The same for views of which each has its rings in VMEM."""
    sizes = [
        view.slices * view.rows * view.cols * itemsize
        for view, itemsize in zip(views, itemsizes, strict=True)
    ]

    def fits(chosen: list[tuple[View, int]]) -> bool:
        slices = sum(view.slices for view, _ in chosen)
        return slices <= MAX_SLICES and _rings_bytes(chosen) <= RINGS_BYTES

    return _packed(sizes, list(zip(views, itemsizes, strict=True)), fits)


def launch_rings(
    views: Sequence[View], dtypes: Sequence[str], itemsizes: Sequence[int]
) -> tuple[tuple[Ring, ...], tuple[Walk, ...]]:
    """The rings of one launch, and how its arrays use them."""
    kinds = [(view.cols, dtype) for view, dtype in zip(views, dtypes, strict=True)]
    heights = list(map(ring_rows, views, itemsizes))
    distinct = list(dict.fromkeys(kinds))
    shared = tuple(
        Ring(max(h for h, k in zip(heights, kinds, strict=True) if k == kind), *kind)
        for kind in distinct
    )
    walks, first = [], 0
    for view, height, kind in zip(views, heights, kinds, strict=True):
        walks.append(Walk(view, height, distinct.index(kind), first))
        first += view.slices
    return shared, tuple(walks)


def ring_rows(view: View, itemsize: int) -> int:
    """Rows of a block: whole tiles of at most `RING_BYTES`, and one tile at least."""
    tile = 32 // itemsize
    return min(
        view.rows, max(tile, RING_BYTES // _width(view, itemsize) // tile * tile)
    )


def _packed(
    sizes: Sequence[int], items: Sequence[Any], fits: Callable[[list[Any]], bool]
) -> list[list[int]]:
    """Neighbours together, as many as one launch takes."""
    launches: list[list[int]] = []
    for position in range(len(sizes)):
        last = launches[-1] if launches else []
        joined = [*last, position]
        if (
            last
            and len(joined) <= MAX_ARRAYS
            and sum(sizes[p] for p in joined) <= LAUNCH_BYTES
            and fits([items[p] for p in joined])
        ):
            last.append(position)
        else:
            launches.append([position])
    return launches


def _rings_bytes(chosen: Sequence[tuple[View, int]]) -> int:
    """VMEM of the rings of such views; two of each, used in turn."""
    largest: dict[tuple[int, int], int] = {}
    for view, itemsize in chosen:
        tile = 32 // itemsize
        rows = -(-ring_rows(view, itemsize) // tile) * tile
        kind = view.cols, itemsize
        size = 2 * RING * rows * _width(view, itemsize)
        largest[kind] = max(largest.get(kind, 0), size)
    return sum(largest.values())


def _width(view: View, itemsize: int) -> int:
    return -(-view.cols // LANES) * LANES * itemsize
