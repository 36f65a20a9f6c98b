"""AdaGC and AdamW of one tensor in one kernel, written for Mosaic.

    phase 0: blocks of g -> VMEM, sums of squares -> scale
    phase 1: g from VMEM; blocks of m, v, p -> m', v', and the update or p'

Every array passes through HBM once. The pipeline that moves blocks is Pallas's own:
what a phase does not use stays at the block where the other phase begins or ends.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from adagc_jax.kernels import xla
from adagc_jax.kernels.adamw_leaf import (
    Done,
    Hypers,
    Leaf,
    blocks,
    moments,
    vmem_bytes,
)
from adagc_jax.kernels.pallas_tpu import from_view, to_view
from adagc_jax.kernels.tiling import Blocks, View
from adagc_jax.kernels.tpu_blocks import (
    IN_SMEM,
    add_squares,
    as_vector,
    is_last,
    scale_in_kernel,
    scaled,
)
from adagc_jax.kernels.varying import struct

RULE = len(xla.Hypers._fields)


def call(
    leaf: Leaf,
    view: View,
    numbers: Sequence[jax.Array],
    joined: Callable[[Any], Hypers],
    in_place: bool,
    interpret: Any,
) -> Done:
    """Runs the kernel on a leaf.

    ``numbers`` are those of the rule and then AdamW's that are not Python's, which
    ``joined`` puts to the others.
    """
    cut = blocks(view)
    held = cut.grid[0] * cut.rows, view.cols
    wide = struct(view.shape, jnp.float32, leaf.p)
    # Operands: numbers, gamma, g, m, v, p. Results: out, m, v, squares.
    aliases = {3: 1, 4: 2} | ({5: 0} if in_place else {})
    out, m, v, squares = pl.pallas_call(
        functools.partial(
            _kernel, view=view, blocks=cut, joined=joined, in_place=in_place
        ),
        grid=(view.slices, 2, cut.grid[0]),
        in_specs=[IN_SMEM, IN_SMEM, _spec(cut, 0), *[_spec(cut, 1)] * 3],
        out_specs=[*[_spec(cut, 1)] * 3, IN_SMEM],
        out_shape=[wide, wide, wide, struct((view.slices,), jnp.float32, leaf.p)],
        input_output_aliases=aliases,
        scratch_shapes=[
            pltpu.VMEM(held, leaf.g.dtype),
            pltpu.VMEM((1, view.cols), jnp.float32),
            pltpu.VMEM((1, 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 3,
            vmem_limit_bytes=vmem_bytes(view, leaf.g.dtype.itemsize),
        ),
        cost_estimate=pl.CostEstimate(
            flops=15 * leaf.g.size,
            transcendentals=leaf.g.size,
            bytes_accessed=(24 + leaf.g.dtype.itemsize) * leaf.g.size,
        ),
        interpret=interpret,
        name="adagc_adamw",
    )(
        jnp.stack(numbers),
        leaf.gamma.reshape(-1),
        *(to_view(x, view) for x in leaf[:4]),
    )
    out, m, v = (from_view(x, view, leaf.g.shape) for x in (out, m, v))
    return Done(out, m, v, squares.reshape(leaf.gamma.shape))


def _kernel(
    numbers_ref: Any,
    gamma_ref: Any,
    g_ref: Any,
    m_ref: Any,
    v_ref: Any,
    p_ref: Any,
    out_ref: Any,
    new_m_ref: Any,
    new_v_ref: Any,
    squares_ref: Any,
    held: Any,
    column_sums: Any,
    scale_ref: Any,
    *,
    view: View,
    blocks: Blocks,
    joined: Callable[[Any], Hypers],
    in_place: bool,
) -> None:
    place, phase, i = (pl.program_id(axis) for axis in range(3))
    only = jnp.int32(0)
    part = pl.ds(pl.multiple_of(i * blocks.rows, blocks.rows), blocks.rows)

    @pl.when(phase == 0)
    def reduce() -> None:
        add_squares(g_ref, column_sums, i, only, view, blocks)
        held[part] = g_ref[...]

    @pl.when((phase == 0) & is_last(i, only, blocks))
    def decide() -> None:
        squares = jnp.sum(column_sums[...])
        squares_ref[place] = squares
        scale_ref[...] = scale_in_kernel(squares, gamma_ref[place], numbers_ref)

    @pl.when(phase == 1)
    def write() -> None:
        count = numbers_ref.shape[0]
        hypers = joined([as_vector(numbers_ref[k]) for k in range(RULE, count)])
        p = p_ref[...]
        update, new_m_ref[...], new_v_ref[...] = moments(
            scaled(held[part], scale_ref[...]), m_ref[...], v_ref[...], p, hypers
        )
        out_ref[...] = p + update if in_place else update


def _spec(blocks: Blocks, phase_of_use: int) -> pl.BlockSpec:
    """Blocks that go by in one phase, and wait in the other where they are next."""
    last = blocks.grid[0] - 1

    def first_phase(s: Any, phase: Any, i: Any) -> Any:
        return (s, i * (1 - phase) + last * phase, 0)

    def second_phase(s: Any, phase: Any, i: Any) -> Any:
        return (s, i * phase, 0)

    index = second_phase if phase_of_use else first_phase
    return pl.BlockSpec((None, blocks.rows, blocks.cols), index)
