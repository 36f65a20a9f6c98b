"""Types inside ``shard_map``: over which mesh axes a kernel's operands vary.

XLA's operations infer it; a Pallas kernel must be told, and wants all operands alike.
"""

from typing import Any

import jax

from adagc_jax.manual import varying_axes


def struct(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.ShapeDtypeStruct:
    """The type of a kernel's result that varies as ``like`` does."""
    aval = jax.typeof(like)
    # Before and after jax 0.10, which keeps more than the varying axes in a type.
    name = "vma" if hasattr(aval, "vma") else "manual_axis_type"
    return jax.ShapeDtypeStruct(shape, dtype, **{name: getattr(aval, name)})


def alike(*operands: jax.Array) -> list[jax.Array]:
    """The operands, each varying over all axes that one of them varies over."""
    every = frozenset().union(*(varying_axes(x) for x in operands))
    return [_vary(x, tuple(sorted(every - varying_axes(x)))) for x in operands]


def _vary(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    if not axes:
        return x
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, axes, to="varying")
    return vars(jax.lax)["pvary"](x, axes)  # its name before jax 0.9
