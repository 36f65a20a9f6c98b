"""Tables of numbers per group, of NumPy outside of a program and of jax inside.

Numbers that are sharded along kept axes are brought together here, whole arrays at a
time: taken out scalar by scalar, each would be a collective of its own.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from adagc_jax.layout import Parts


class Table(NamedTuple):
    """Columns with one number per group, each as flat pieces, one for each part."""

    pieces: dict[str, tuple[Any, ...]]

    def column(self, name: str) -> Any:
        """The numbers of all groups, ``[groups]``."""
        pieces = self.pieces[name]
        return xp_of(pieces[0]).concatenate(pieces)

    def scalars(self, name: str) -> Iterator[Any]:
        """The number of each group by itself."""
        for piece in self.pieces[name]:
            if isinstance(piece, np.ndarray):
                yield from piece
                continue
            for place in range(piece.shape[0]):
                # Indexing would trace several operations for each of many numbers.
                one = jax.lax.slice(piece, (place,), (place + 1,))
                yield jax.lax.squeeze(one, (0,))


def make_table(columns: dict[str, Parts], *, has_vector: bool) -> Table:
    """The table of columns that are packed like state, perhaps with a vector first."""
    by_dtype: dict[Any, list[str]] = {}
    for name, parts in columns.items():
        by_dtype.setdefault(np.dtype(parts[0].dtype), []).append(name)
    pieces: dict[str, tuple[Any, ...]] = dict.fromkeys(columns, ())
    for names in by_dtype.values():
        parts = zip(*(columns[name] for name in names), strict=True)
        for number, part in enumerate(parts):
            # That of whole leaves is flat, and on all devices.
            flat = part if has_vector and number == 0 else _gathered(part)
            for name, piece in zip(names, flat, strict=True):
                pieces[name] += (piece,)
    return Table(pieces)


def _gathered(parts: Sequence[Any]) -> list[Any]:
    """One part of every column, flat and on all devices."""
    if isinstance(parts[0], np.ndarray):
        return [part.reshape(-1) for part in parts]
    together = jnp.stack(parts)
    mesh = jax.typeof(together).sharding.mesh
    if AxisType.Explicit in (mesh.axis_types or ()):
        together = jax.sharding.reshard(together, PartitionSpec())
    # Columns first: with groups behind them no sharding of the groups is one of the
    # flat array, so that the compiler gathers it here, and not for each number.
    together = together.reshape(-1)
    size = math.prod(parts[0].shape)
    return [together[i * size : (i + 1) * size] for i in range(len(parts))]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines of text, with columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def rate(clipped: Any, active: Any) -> Any:
    """The fraction of the active updates that were clipped, f32."""
    xp = xp_of(clipped)
    return clipped / xp.maximum(active, 1).astype(xp.float32)


def xp_of(value: Any) -> Any:
    """The module that computes with a value: ``numpy`` or ``jax.numpy``."""
    return np if isinstance(value, np.ndarray | np.generic) else jnp
