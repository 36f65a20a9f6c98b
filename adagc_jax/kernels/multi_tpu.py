"""Sums of squares of many arrays in one launch on TPU, written for Mosaic.

arrays -> (slices, rows, columns) views -> blocks through rings in VMEM -> sums

The arrays stay in HBM. Each goes through one of two rings of its shape, by turns, so
that the first blocks of the next one are on their way while one is being summed.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from adagc_jax.kernels import tiling
from adagc_jax.kernels.launches import RING, Ring, Walk, launch_rings, tpu_launches
from adagc_jax.kernels.pallas_tpu import to_view
from adagc_jax.kernels.tiling import View
from adagc_jax.kernels.tpu_blocks import IN_SMEM
from adagc_jax.kernels.varying import struct


def launches(
    arrays: Sequence[jax.Array], keeps: Sequence[tuple[int, ...]]
) -> list[list[int]]:
    """Positions of the arrays that go together."""
    return tpu_launches(_views(arrays, keeps), [x.dtype.itemsize for x in arrays])


def sums(
    arrays: Sequence[jax.Array], keeps: Sequence[tuple[int, ...]], interpret: Any
) -> list[jax.Array]:
    """Sums of squares of each array's slices, f32[slices] each."""
    views, dtypes = _views(arrays, keeps), [x.dtype for x in arrays]
    names, sizes = [d.name for d in dtypes], [d.itemsize for d in dtypes]
    rings, walks = launch_rings(views, names, sizes)
    slices = sum(view.slices for view in views)
    total = pl.pallas_call(
        functools.partial(_kernel, rings=rings, walks=walks),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(arrays),
        out_specs=IN_SMEM,
        out_shape=struct((slices,), jnp.float32, arrays[0]),
        scratch_shapes=[
            *[pltpu.VMEM((2, RING, r.rows, r.cols), jnp.dtype(r.dtype)) for r in rings],
            *[pltpu.VMEM((1, r.cols), jnp.float32) for r in rings],
            pltpu.SemaphoreType.DMA((2, RING)),
        ],
        cost_estimate=pl.CostEstimate(
            flops=2 * sum(x.size for x in arrays),
            transcendentals=0,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
        ),
        interpret=interpret,
        name="adagc_sums_of_squares",
    )(*map(to_view, arrays, views))
    return [total[w.first : w.first + w.view.slices] for w in walks]


def _views(arrays: Sequence[jax.Array], keeps: Sequence[tuple[int, ...]]) -> list[View]:
    return [
        tiling.tpu_view(x.shape, keep, x.dtype.name)
        for x, keep in zip(arrays, keeps, strict=True)
    ]


def _kernel(*refs: Any, rings: Sequence[Ring], walks: Sequence[Walk]) -> None:
    arrays, out, rest = refs[: len(walks)], refs[len(walks)], refs[len(walks) + 1 :]
    buffers, column_sums = rest[: len(rings)], rest[len(rings) : -1]
    tasks = [
        _Task(
            walk,
            array,
            buffers[walk.ring].at[number % 2],
            column_sums[walk.ring],
            rest[-1].at[number % 2],
            out,
        )
        for number, (walk, array) in enumerate(zip(walks, arrays, strict=True))
    ]
    tasks[0].begin()
    for task, following in zip(tasks, [*tasks[1:], None], strict=True):
        if following:
            following.begin()
        task.run()


@dataclasses.dataclass(frozen=True)
class _Task:
    """One array of a launch on its way through a ring; the fields are references."""

    walk: Walk
    array: Any
    buffer: Any
    column_sums: Any
    moved: Any
    out: Any

    @property
    def total(self) -> int:
        """Blocks of all slices."""
        return self.walk.view.slices * self.walk.blocks

    def begin(self) -> None:
        """Sends for the first blocks."""
        for t in range(min(RING, self.total)):
            self._sized(jnp.int32(t), self._start)

    def run(self) -> None:
        """Sums all blocks, and sends for each next one."""

        def body(t: Any, carry: Any) -> Any:
            self._sized(t, self._add)
            pl.when(t + RING < self.total)(lambda: self._sized(t + RING, self._start))
            return carry

        jax.lax.fori_loop(jnp.int32(0), jnp.int32(self.total), body, jnp.int32(0))

    def _sized(self, t: Any, do: Any) -> None:
        """``do(t, slice, block, rows)``: the last block of a slice may be shorter."""
        blocks, rows = self.walk.blocks, self.walk.rows
        place, i = jax.lax.div(t, jnp.int32(blocks)), jax.lax.rem(t, jnp.int32(blocks))
        if rest := self.walk.view.rows % rows:
            pl.when(i < blocks - 1)(lambda: do(t, place, i, rows))
            pl.when(i == blocks - 1)(lambda: do(t, place, i, rest))
        else:
            do(t, place, i, rows)

    def _copy(self, t: Any, place: Any, i: Any, rows: int) -> Any:
        slot = jax.lax.rem(t, jnp.int32(RING))
        start = pl.multiple_of(i * self.walk.rows, self.walk.rows)
        return pltpu.make_async_copy(
            self.array.at[place, pl.ds(start, rows)],
            self.buffer.at[slot, pl.ds(0, rows)],
            self.moved.at[slot],
        )

    def _start(self, *block: Any) -> None:
        self._copy(*block).start()

    def _add(self, t: Any, place: Any, i: Any, rows: int) -> None:
        self._copy(t, place, i, rows).wait()
        values = self.buffer[jax.lax.rem(t, jnp.int32(RING)), :rows]
        values = values.astype(jnp.float32)
        squares = jnp.sum(values * values, axis=0, keepdims=True)
        # Whatever the first block finds there may be NaN.
        before = jnp.where(i == 0, 0.0, self.column_sums[...])
        self.column_sums[...] = before + squares

        @pl.when(i == self.walk.blocks - 1)
        def finish() -> None:
            self.out[self.walk.first + place] = jnp.sum(self.column_sums[...])
