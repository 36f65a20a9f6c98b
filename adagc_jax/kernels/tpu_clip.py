"""Clipping on TPU: one read of a slice that VMEM holds, two of a larger one.

Either call takes (hyper-parameters f32[3], gamma f32[slices], view) and returns the
clipped view and the slices' sums of squares.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from adagc_jax.kernels import tiling
from adagc_jax.kernels.tiling import Blocks, View
from adagc_jax.kernels.tpu_blocks import (
    IN_SMEM,
    add_squares,
    cost,
    is_last,
    scale_in_kernel,
    scaled,
)
from adagc_jax.kernels.varying import struct


def two_phase_call(x: jax.Array, view: View, interpret: Any) -> Any:
    """A grid that goes over the blocks of a slice twice: to sum and to scale."""
    blocks = tiling.blocks(view, x.dtype.itemsize)
    return pl.pallas_call(
        functools.partial(_two_phase_kernel, view=view, blocks=blocks),
        grid=(view.slices, 2, *blocks.grid),
        in_specs=[IN_SMEM, IN_SMEM, _phased_spec(blocks, stay=False)],
        out_specs=[_phased_spec(blocks, stay=True), IN_SMEM],
        out_shape=_clip_shapes(x, view),
        scratch_shapes=[
            pltpu.VMEM((1, blocks.cols), jnp.float32),
            pltpu.VMEM((1, 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 4),
        cost_estimate=cost(x, passes=3),
        interpret=interpret,
        name="adagc_clip_two_phase",
    )


def resident_call(x: jax.Array, view: View, interpret: Any) -> Any:
    """A kernel that holds each slice between its read and its write."""
    itemsize = x.dtype.itemsize
    rows = min(view.rows, tiling.blocks(view, itemsize).rows)
    return pl.pallas_call(
        functools.partial(_resident_kernel, rows=rows),
        grid=(view.slices,),
        in_specs=[IN_SMEM, IN_SMEM, pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=[pl.BlockSpec(memory_space=pl.ANY), IN_SMEM],
        out_shape=_clip_shapes(x, view),
        scratch_shapes=[
            pltpu.VMEM((view.rows, view.cols), x.dtype),
            pltpu.VMEM((1, view.cols), jnp.float32),
            pltpu.SemaphoreType.DMA((pl.cdiv(view.rows, rows),)),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=tiling.resident_bytes(view, itemsize),
        ),
        cost_estimate=cost(x, passes=2),
        interpret=interpret,
        name="adagc_clip_resident",
    )


def _two_phase_kernel(
    hypers_ref: Any,
    gamma_ref: Any,
    x_ref: Any,
    y_ref: Any,
    squares_ref: Any,
    column_sums: Any,
    scale_ref: Any,
    *,
    view: View,
    blocks: Blocks,
) -> None:
    place, phase, i, j = (pl.program_id(axis) for axis in range(4))

    @pl.when(phase == 0)
    def reduce() -> None:
        add_squares(x_ref, column_sums, i, j, view, blocks)

    @pl.when((phase == 0) & is_last(i, j, blocks))
    def decide() -> None:
        squares = jnp.sum(column_sums[...])
        squares_ref[place] = squares
        scale_ref[...] = scale_in_kernel(squares, gamma_ref[place], hypers_ref)

    @pl.when(phase == 1)
    def scale() -> None:
        y_ref[...] = scaled(x_ref[...], scale_ref[...])


def _resident_kernel(
    hypers_ref: Any,
    gamma_ref: Any,
    x_ref: Any,
    y_ref: Any,
    squares_ref: Any,
    held: Any,
    column_sums: Any,
    moved: Any,
    *,
    rows: int,
) -> None:
    place = pl.program_id(0)
    each = functools.partial(_each_chunk, held.shape[0], rows)

    def copy_in(i: Any, part: Any) -> Any:
        return pltpu.make_async_copy(x_ref.at[place, part], held.at[part], moved.at[i])

    def copy_out(i: Any, part: Any) -> Any:
        return pltpu.make_async_copy(held.at[part], y_ref.at[place, part], moved.at[i])

    def add(i: Any, part: Any) -> None:
        copy_in(i, part).wait()
        values = held[part].astype(jnp.float32)
        column_sums[...] += jnp.sum(values * values, axis=0, keepdims=True)

    column_sums[...] = jnp.zeros_like(column_sums)
    each(lambda i, part: copy_in(i, part).start())
    each(add)
    squares = jnp.sum(column_sums[...])
    squares_ref[place] = squares
    scale = scale_in_kernel(squares, gamma_ref[place], hypers_ref)

    def scale_and_send(i: Any, part: Any) -> None:
        held[part] = scaled(held[part], scale)
        copy_out(i, part).start()

    each(scale_and_send)
    each(lambda i, part: copy_out(i, part).wait())


def _each_chunk(total: int, rows: int, do: Any) -> None:
    """``do(i, rows of chunk i)`` for all chunks: a loop, and the shorter last one."""
    whole, rest = divmod(total, rows)

    def body(i: Any, _: Any) -> Any:
        do(i, pl.ds(pl.multiple_of(i * rows, rows), rows))
        return _

    jax.lax.fori_loop(jnp.int32(0), jnp.int32(whole), body, jnp.int32(0))
    if rest:
        do(jnp.int32(whole), pl.ds(whole * rows, rest))


def _phased_spec(blocks: Blocks, stay: bool) -> pl.BlockSpec:
    """Blocks in both phases, or in the first phase the one the second begins with."""

    def index(s: Any, phase: Any, i: Any, j: Any) -> Any:
        return (s, i * phase, j * phase) if stay else (s, i, j)

    return pl.BlockSpec((None, blocks.rows, blocks.cols), index)


def _clip_shapes(x: jax.Array, view: View) -> list[jax.ShapeDtypeStruct]:
    return [struct(view.shape, x.dtype, x), struct((view.slices,), jnp.float32, x)]
