"""Sums of squares of many arrays in two launches on GPU, written for Triton.

    arrays -> a sum for every block of every array -> a sum for every slice

As in `triton_gpu` no program writes where another one does: the same bits in every run.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from adagc_jax.kernels import tiling
from adagc_jax.kernels.launches import gpu_launches
from adagc_jax.kernels.tiling import GPU_BLOCK
from adagc_jax.kernels.triton_gpu import block_sum
from adagc_jax.kernels.varying import alike, struct

# Sums of blocks that one program adds at a time.
_SUMS = 1024


class _Part(NamedTuple):
    """The blocks of one array: how many slices, elements and blocks of each."""

    first: int
    slices: int
    length: int
    parts: int


def launches(
    arrays: Sequence[jax.Array], keeps: Sequence[tuple[int, ...]]
) -> list[list[int]]:
    """Positions of the arrays that go together."""
    del keeps
    return gpu_launches([x.size * x.dtype.itemsize for x in arrays])


def sums(
    arrays: Sequence[jax.Array], keeps: Sequence[tuple[int, ...]], interpret: Any
) -> list[jax.Array]:
    """Sums of squares of each array's leading slices, f32[slices] each."""
    slices = [
        tiling.slices(x.shape, keep) for x, keep in zip(arrays, keeps, strict=True)
    ]
    blocks, total = _blocks(arrays, slices)
    partial = pl.pallas_call(
        functools.partial(_kernel, blocks=blocks),
        grid=(total,),
        out_shape=struct((total,), jnp.float32, arrays[0]),
        compiler_params=plgpu.CompilerParams(num_warps=8),
        interpret=interpret,
        name="adagc_sums_of_squares",
    )(*(x.reshape(-1) for x in arrays))
    counts = np.repeat([b.parts for b in blocks], slices).astype(np.int32)
    firsts = (np.cumsum(counts) - counts).astype(np.int32)
    by_slice = pl.pallas_call(
        _add_up,
        grid=(len(counts),),
        out_shape=struct((len(counts),), jnp.float32, arrays[0]),
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=interpret,
        name="adagc_add_up",
    )(*alike(partial, jnp.asarray(firsts), jnp.asarray(counts)))
    ends = np.cumsum(slices)
    return [by_slice[end - n : end] for end, n in zip(ends, slices, strict=True)]


def _blocks(
    arrays: Sequence[jax.Array], slices: Sequence[int]
) -> tuple[list[_Part], int]:
    blocks, first = [], 0
    for x, count in zip(arrays, slices, strict=True):
        length = x.size // count
        part = _Part(first, count, length, pl.cdiv(length, GPU_BLOCK))
        first += part.slices * part.parts
        blocks.append(part)
    return blocks, first


def _kernel(*refs: Any, blocks: Sequence[_Part]) -> None:
    *arrays, out_ref = refs
    program = pl.program_id(0)
    for x_ref, part in zip(arrays, blocks, strict=True):
        end = part.first + part.slices * part.parts

        @pl.when((program >= part.first) & (program < end))
        def of_this_array(x_ref: Any = x_ref, part: _Part = part) -> None:
            number = program - part.first
            out_ref[program] = block_sum(x_ref, number, part.length, part.parts)


def _add_up(partial_ref: Any, first_ref: Any, count_ref: Any, out_ref: Any) -> None:
    place = pl.program_id(0)
    first, count = first_ref[place], count_ref[place]

    def add(i: Any, total: jax.Array) -> jax.Array:
        start = i * _SUMS
        inside = start + jax.lax.iota(jnp.int32, _SUMS) < count
        chunk = partial_ref.at[pl.ds(first + start, _SUMS)]
        return total + plgpu.load(chunk, mask=inside, other=0.0)

    rounds = jax.lax.div(count + (_SUMS - 1), jnp.int32(_SUMS))
    zeros = jnp.zeros(_SUMS, jnp.float32)
    out_ref[place] = jnp.sum(jax.lax.fori_loop(jnp.int32(0), rounds, add, zeros))
