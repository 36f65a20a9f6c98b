"""What the TPU kernels share: blocks of a view, their squares, and the scale.

Blocks stick out over the last row and column of a view; what is read there is anything,
NaN included, and is masked.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from adagc_jax.kernels.tiling import Blocks, View
from adagc_jax.kernels.xla import Hypers, steady_scale

IN_SMEM = pl.BlockSpec(memory_space=pltpu.SMEM)


def add_squares(
    x_ref: Any,
    column_sums: Any,
    i: Any,
    j: Any,
    view: View,
    blocks: Blocks,
    scale: Any = None,
) -> None:
    """Adds the squares of block (i, j) to sums that the first block starts."""
    ragged = view.rows % blocks.rows != 0, view.cols % blocks.cols != 0
    over = [
        at == n - 1 for at, n, r in zip((i, j), blocks.grid, ragged, strict=True) if r
    ]
    on_edge = functools.reduce(jnp.logical_or, over) if over else None

    @pl.when((i == 0) & (j == 0))
    def start() -> None:
        column_sums[...] = jnp.zeros_like(column_sums)

    def add(masked: bool) -> None:
        values = x_ref[...].astype(jnp.float32)
        if scale is not None:
            values = values * scale
        if masked:
            values = jnp.where(_inside(i, j, view, blocks), values, 0.0)
        column_sums[...] += jnp.sum(values * values, axis=0, keepdims=True)

    if on_edge is None:
        add(masked=False)
    else:
        pl.when(on_edge)(lambda: add(masked=True))
        pl.when(~on_edge)(lambda: add(masked=False))


def is_last(i: Any, j: Any, blocks: Blocks) -> Any:
    """Whether (i, j) is the last block of a slice."""
    rows, cols = blocks.grid
    return (i == rows - 1) & (j == cols - 1)


def scale_in_kernel(squares: Any, gamma: Any, hypers_ref: Any) -> jax.Array:
    """The scale as f32[1, 1]: scalars have neither a square root nor a quotient."""
    hypers = Hypers(*(as_vector(hypers_ref[k]) for k in range(len(Hypers._fields))))
    return steady_scale(as_vector(squares), as_vector(gamma), hypers)


def scaled(values: jax.Array, scale: jax.Array) -> jax.Array:
    """As `norms.scale_leaf`: exact for a scale of one and of zero."""
    wide = values.astype(jnp.float32)
    product = jnp.where(scale == 0.0, 0.0, wide * scale)
    return jnp.where(scale == 1.0, wide, product).astype(values.dtype)


def cost(x: jax.Array, passes: int) -> pl.CostEstimate:
    """For XLA's scheduler: so many passes over the array."""
    return pl.CostEstimate(
        flops=2 * x.size,
        transcendentals=0,
        bytes_accessed=passes * x.size * x.dtype.itemsize,
    )


def _inside(i: Any, j: Any, view: View, blocks: Blocks) -> jax.Array:
    """Which elements of block (i, j) are elements of the array."""
    shape = (blocks.rows, blocks.cols)
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    col = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return (row < view.rows - i * blocks.rows) & (col < view.cols - j * blocks.cols)


def as_vector(scalar: Any) -> jax.Array:
    """A number as f32[1, 1]."""
    return jnp.full((1, 1), scalar, jnp.float32)
