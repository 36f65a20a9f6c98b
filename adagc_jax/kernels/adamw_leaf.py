"""One tensor through AdaGC's steady rule and AdamW: as XLA does it, and by a kernel.

    adamw_update -> Leaf -> fused -> adamw_tpu, with the derivatives and the batching of
                                     the reference here

Both run `moments`, which calls optax: there is no second AdamW.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from adagc_jax.kernels import tiling, xla
from adagc_jax.kernels.one_device import on_one_device
from adagc_jax.kernels.tiling import LANES, MIB, Blocks, View
from adagc_jax.kernels.transformable import with_rules_of
from adagc_jax.kernels.varying import alike

# Of one block; fourteen of them are on their way at a time, in and out.
BLOCK_BYTES = MIB // 4
BUFFERS = 14
# For what the compiler keeps of a block between two operations.
SPILL_BYTES = 2 * MIB
# Rows of a tile of bfloat16; those of float32 divide it.
TILE = 16


class Hypers(NamedTuple):
    """AdamW's numbers in one update: Python's where known, which optax rounds last.

    Attributes:
      b1: Decay of the first moment.
      b2: Decay of the second.
      eps: Added to the root of the second.
      weight_decay: Of the parameter in the update.
      step_size: The negative learning rate.
      correction1: ``1 - b1**t``.
      correction2: ``1 - b2**t``.
    """

    b1: Any
    b2: Any
    eps: Any
    weight_decay: Any
    step_size: Any
    correction1: Any
    correction2: Any


class Leaf(NamedTuple):
    """What is read of one tensor: gradient, moments, parameter, limit's reference.

    ``gamma`` is f32 of the kept axes' shape, and infinite where there is none.
    """

    g: jax.Array
    m: jax.Array
    v: jax.Array
    p: jax.Array
    gamma: jax.Array


class Done(NamedTuple):
    """What is written: the update or the new parameter, moments, sums of squares."""

    out: jax.Array
    m: jax.Array
    v: jax.Array
    squares: jax.Array


def why_not_fused(leaf: Leaf, keep: tuple[int, ...], kind: str) -> str:
    """Why the kernel cannot serve a leaf that the norms' kernel can; empty if it can.

    ``kind`` is that of the device.
    """
    wide = {"mu": leaf.m, "nu": leaf.v, "params": leaf.p}
    for name, x in wide.items():
        if x.dtype != jnp.float32 or x.shape != leaf.g.shape:
            return f"its kernel updates float32 {name}, not {x.dtype}{list(x.shape)}"
    view = _view(leaf.g, keep)
    if view != _view(leaf.p, keep):
        return "XLA keeps its gradient and its parameter in different layouts on TPU"
    needs = vmem_bytes(view, leaf.g.dtype.itemsize)
    if needs > (has := tiling.vmem_bytes(kind)):
        return (
            f"its kernel holds a gradient in VMEM and needs {math.ceil(needs / MIB)} "
            f"MiB of it; there are {has // MIB}"
        )
    return ""


def blocks(view: View) -> Blocks:
    """Blocks of whole rows of a slice."""
    rows = max(TILE, BLOCK_BYTES // (4 * _padded(view.cols)) // TILE * TILE)
    rows = min(rows, view.rows)
    return Blocks(rows, view.cols, (-(-view.rows // rows), 1))


def vmem_bytes(view: View, itemsize: int) -> int:
    """VMEM of the kernel: one gradient slice, and blocks on their way."""
    cut = blocks(view)
    rows = -(-cut.rows // TILE) * TILE
    held = cut.grid[0] * rows * _padded(view.cols) * itemsize
    return held + BUFFERS * rows * _padded(view.cols) * 4 + SPILL_BYTES


def fused(
    leaf: Leaf,
    keep: tuple[int, ...],
    rule: xla.Hypers,
    hypers: Hypers,
    in_place: bool,
    interpret: Any,
) -> Done:
    """The leaf by the kernel, which was found to serve it.

    With ``in_place`` the first result is the new parameter, else the update.
    """
    traced = [k for k, h in enumerate(hypers) if isinstance(h, jax.Array)]
    numbers = [jnp.asarray(hypers[k], jnp.float32) for k in traced]

    def joined(numbers: Any) -> Hypers:
        values = list(hypers)
        for k, number in zip(traced, numbers, strict=True):
            values[k] = number
        return Hypers(*values)

    def reference(*operands: jax.Array) -> Done:
        own, limits, rest = _split(operands)
        return by_xla(own, keep, limits, joined(rest), in_place)

    def kernel(*operands: jax.Array) -> Done:
        from adagc_jax.kernels import adamw_tpu  # Pallas takes a while to load.

        own, limits, rest = _split(operands)
        view = _view(own.g, keep)
        return adamw_tpu.call(own, view, [*limits, *rest], joined, in_place, interpret)

    served = with_rules_of(reference, on_one_device(kernel))
    return served(*alike(*leaf, *rule, *numbers))


def by_xla(
    leaf: Leaf, keep: tuple[int, ...], rule: xla.Hypers, hypers: Hypers, in_place: bool
) -> Done:
    """The reference: what the kernel must equal."""
    clipped, squares = xla.clip(leaf.g, leaf.gamma, rule, keep)
    update, m, v = moments(clipped, leaf.m, leaf.v, leaf.p, hypers)
    return Done(leaf.p + update if in_place else update, m, v, squares)


def moments(g: Any, m: Any, v: Any, p: Any, hypers: Hypers) -> Any:
    """AdamW of a clipped gradient: the update and both new moments."""
    m = optax.tree.update_moment(g, m, hypers.b1, 1)
    v = optax.tree.update_moment_per_elem_norm(g, v, hypers.b2, 2)
    root = jnp.sqrt(v / hypers.correction2)
    update = m / hypers.correction1 / (root + hypers.eps)
    if not (isinstance(hypers.weight_decay, int | float) and hypers.weight_decay == 0):
        update = update + hypers.weight_decay * p
    return hypers.step_size * update, m, v


def _split(operands: Any) -> tuple[Leaf, xla.Hypers, Any]:
    leaf, rule = len(Leaf._fields), len(xla.Hypers._fields)
    limits = xla.Hypers(*operands[leaf : leaf + rule])
    return Leaf(*operands[:leaf]), limits, operands[leaf + rule :]


def _view(x: jax.Array, keep: tuple[int, ...]) -> View:
    return tiling.tpu_view(x.shape, keep, x.dtype.name)


def _padded(cols: int) -> int:
    return -(-cols // LANES) * LANES
