"""Sums of squares on GPU: a Triton kernel of partial sums, which XLA then adds up.

Every program of the grid sums one block of one slice and writes one number, so the
result does not depend on the order in which they run. Scaling an array is left to XLA,
which does it at the speed of memory.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from adagc_jax.kernels.tiling import GPU_BLOCK
from adagc_jax.kernels.varying import struct


def sums(
    x: jax.Array, slices: int, scale: jax.Array | None, interpret: Any
) -> jax.Array:
    """Sums of ``(scale * x)**2`` of each of the leading slices, f32[slices]."""
    length = x.size // slices
    parts = pl.cdiv(length, GPU_BLOCK)
    operands = [x.reshape(-1)] + ([] if scale is None else [scale])
    partial = pl.pallas_call(
        functools.partial(_kernel, length=length, parts=parts),
        grid=(slices * parts,),
        out_shape=struct((slices * parts,), jnp.float32, x),
        compiler_params=plgpu.CompilerParams(num_warps=8),
        interpret=interpret,
        name="adagc_sum_squares",
    )(*operands)
    return jnp.sum(partial.reshape(slices, parts), axis=1)


def _kernel(x_ref: Any, *refs: Any, length: int, parts: int) -> None:
    *scale_ref, out_ref = refs
    program = pl.program_id(0)
    place = jax.lax.div(program, jnp.int32(parts))
    scale = scale_ref[0][place] if scale_ref else None
    out_ref[program] = block_sum(x_ref, program, length, parts, scale)


def block_sum(
    x_ref: Any, number: Any, length: int, parts: int, scale: Any = None
) -> jax.Array:
    """The sum of the squares of one block.

    A slice has ``length`` elements in ``parts`` blocks; blocks are numbered across
    slices.
    """
    place = jax.lax.div(number, jnp.int32(parts))
    start = jax.lax.rem(number, jnp.int32(parts)) * GPU_BLOCK
    inside = start + jax.lax.iota(jnp.int32, GPU_BLOCK) < length
    block = x_ref.at[pl.ds(place * length + start, GPU_BLOCK)]
    values = plgpu.load(block, mask=inside, other=0.0).astype(jnp.float32)
    values = values if scale is None else values * scale
    return jnp.sum(values * values)
