"""The last look before a kernel is compiled: that its program is for one device.

    dispatch, multi, adamw_leaf -> on_one_device(kernel) -> pallas_call

`placement` asks types, meshes and the caller where an array lies, and none of them has
to know: a program that is compiled for a pod by a process with one device shows
neither. Whoever lowers it knows how many devices it is for.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters import mlir


def on_one_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel``, which lowering refuses to hand to a compiler that partitions it.

    Inside ``jax.shard_map`` there is nothing to partition. Adds no operation.
    """

    def looked_at(first: jax.Array, *others: jax.Array) -> Any:
        return kernel(_look().bind(first), *others)

    return looked_at


@functools.cache
def _look() -> Any:
    """An operation that hands its operand through, and is looked at when lowered."""
    from jax.extend.core import Primitive  # It loads Pallas, which takes a while.

    look = Primitive("adagc_on_one_device")
    look.def_impl(lambda x: x)
    look.def_abstract_eval(lambda x: x)
    mlir.register_lowering(look, _lower)
    return look


def _lower(context: mlir.LoweringRuleContext, x: Any) -> list[Any]:
    # Inside shard_map the context is a mesh with manual axes, and counts no devices.
    count = getattr(context.module_context.axis_context, "num_devices", 1)
    if count > 1:
        raise ValueError(
            f"A Pallas kernel was asked for in a program for {count} devices, and "
            "would gather its arrays whole on each of them. Say how they are sharded "
            "or replicated, kernels.Backend(..., shardings=...) with NamedShardings, "
            'or call it inside jax.shard_map, or use backend="xla".'
        )
    return [x]
