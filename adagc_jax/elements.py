"""Takes a packed vector apart into scalars, in programs that stay quick to compile.

XLA for CPU fuses the slice of an element into the kernel that uses it. The place of the
element is then a constant of that kernel, and a step over hundreds of tensors compiles
one kernel for each where it would compile one for each shape of tensor.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Below this, slices cost less than what hides them.
FEW = 16


def elements(vector: jax.Array) -> list[jax.Array]:
    """The elements of a vector, as scalars."""
    return [_element(vector, place) for place in range(vector.shape[0])]


def hidden_elements(vector: jax.Array) -> list[jax.Array]:
    """The elements, in a way that XLA for CPU cannot fuse with what uses them.

    For vectors that are no constant and not the same number throughout, which XLA sees
    through by itself. On other platforms the same as `elements`: a launch would cost
    more than the kernel that it saves.
    """
    return elements(vector) if vector.shape[0] < FEW else list(_hidden(vector))


@functools.partial(jax.jit, inline=True)
def _hidden(vector: jax.Array) -> tuple[jax.Array, ...]:
    # Under jit, so that an update outside of it does not trace branches every time.
    return lax.platform_dependent(
        vector,
        cpu=lambda v: tuple(_by_branches(v)),
        default=lambda v: tuple(elements(v)),
    )


def _by_branches(vector: jax.Array) -> list[jax.Array]:
    """Through rows of about the root of the number of elements.

    All rows share the kernels that take an element out of a row.
    """
    size = vector.shape[0]
    width = math.isqrt(size - 1) + 1
    starts = range(0, size, width)
    padded = jnp.pad(vector, (0, len(starts) * width - size))
    rows = _unfused(
        lambda v: tuple(lax.slice(v, (start,), (start + width,)) for start in starts),
        padded,
    )
    scalars = [_unfused(lambda row: tuple(elements(row)), row) for row in rows]
    return [scalar for row in scalars for scalar in row][:size]


def _unfused(take: Callable[[jax.Array], Any], vector: jax.Array) -> Any:
    """What ``take`` returns, behind a branch: both sides do the same.

    An optimization barrier would say it better, but is gone before XLA for CPU fuses.
    """
    return lax.cond(vector[0] == 0, take, take, vector)


def _element(vector: jax.Array, place: int) -> jax.Array:
    return lax.squeeze(lax.slice(vector, (place,), (place + 1,)), (0,))
