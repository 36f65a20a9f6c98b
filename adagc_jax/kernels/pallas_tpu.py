"""Sums of squares and fused clipping on TPU, written for Mosaic.

array -> (slices, rows, columns) view -> sums, here, or a kernel of tpu_clip
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from adagc_jax.kernels import tiling
from adagc_jax.kernels.tiling import Blocks, View
from adagc_jax.kernels.tpu_blocks import IN_SMEM, add_squares, cost, is_last
from adagc_jax.kernels.tpu_clip import resident_call, two_phase_call
from adagc_jax.kernels.varying import struct
from adagc_jax.kernels.xla import Hypers


def sums(
    x: jax.Array, view: View, scale: jax.Array | None, interpret: Any
) -> jax.Array:
    """Sums of ``(scale * x)**2`` of each slice, f32[slices]."""
    blocks = tiling.blocks(view, x.dtype.itemsize)
    operands = [to_view(x, view)] + ([] if scale is None else [scale])
    return pl.pallas_call(
        functools.partial(_sums_kernel, view=view, blocks=blocks),
        grid=(view.slices, *blocks.grid),
        in_specs=[_block_spec(blocks), *[IN_SMEM] * (len(operands) - 1)],
        out_specs=IN_SMEM,
        out_shape=struct((view.slices,), jnp.float32, x),
        scratch_shapes=[pltpu.VMEM((1, blocks.cols), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 3),
        cost_estimate=cost(x, passes=1),
        interpret=interpret,
        name="adagc_sum_squares",
    )(*operands)


def clip(
    x: jax.Array,
    gamma: jax.Array,
    hypers: Hypers,
    view: View,
    kind: str,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """``x`` clipped by the steady rule, and the sums of squares of its slices.

    ``kind`` is that of the device, which says how much fits into VMEM.
    """
    fits = tiling.fits(view, x.dtype.itemsize, kind)
    call = resident_call if fits else two_phase_call
    y, squares = call(x, view, interpret)(jnp.stack(hypers), gamma, to_view(x, view))
    return from_view(y, view, x.shape), squares


def to_view(x: jax.Array, view: View) -> jax.Array:
    """The array as its view: a bitcast in the layout that XLA gives it."""
    return (jnp.swapaxes(x, -1, -2) if view.swapped else x).reshape(view.shape)


def from_view(y: jax.Array, view: View, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `to_view`."""
    if not view.swapped:
        return y.reshape(shape)
    return jnp.swapaxes(y.reshape(*shape[:-2], shape[-1], shape[-2]), -1, -2)


def _sums_kernel(x_ref: Any, *refs: Any, view: View, blocks: Blocks) -> None:
    *scale_ref, out_ref, column_sums = refs
    place, i, j = (pl.program_id(axis) for axis in range(3))
    scale = scale_ref[0][place] if scale_ref else None
    add_squares(x_ref, column_sums, i, j, view, blocks, scale)

    @pl.when(is_last(i, j, blocks))
    def finish() -> None:
        out_ref[place] = jnp.sum(column_sums[...])


def _block_spec(blocks: Blocks) -> pl.BlockSpec:
    return pl.BlockSpec((None, blocks.rows, blocks.cols), lambda s, i, j: (s, i, j))
