"""Makes a Pallas kernel a function like others: it may be differentiated and batched.

There it is its XLA reference. With 64-bit types switched on it is itself, traced
without them: Mosaic has no 64-bit indices.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import custom_batching


def with_rules_of(
    reference: Callable[..., Any], kernel: Callable[..., Any]
) -> Callable[..., Any]:
    """``kernel``, which under ``grad``, ``jvp`` and ``vmap`` is ``reference``.

    Both take and return arrays only, and mean the same.
    """

    def in_32_bits(*args: Any) -> Any:
        with jax.enable_x64(False):
            return kernel(*args)

    batchable = custom_batching.custom_vmap(in_32_bits)

    @batchable.def_vmap
    def batched(axis_size: int, in_batched: list[bool], *args: Any) -> Any:
        axes = [0 if is_batched else None for is_batched in in_batched]
        out = jax.vmap(reference, in_axes=axes, axis_size=axis_size)(*args)
        return out, jax.tree.map(lambda _: True, out)

    differentiable = jax.custom_jvp(batchable)

    @differentiable.defjvp
    def jvp(primals: Any, tangents: Any) -> Any:
        return jax.jvp(reference, primals, tangents)

    return differentiable
