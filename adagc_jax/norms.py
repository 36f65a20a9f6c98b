"""Reduce and scale: the only two places where gradients are touched.

Sums of squares are accumulated in float32 whatever the leaf's dtype and travel as
squares, so that partial sums can be pooled before the one square root.

Range. Elements are multiplied by 2**16, which is exact, before they are squared.
A norm is then right from about 1e-24 to 2.8e14. Below, it reads as zero, an
inactive observation; above, as infinity, a non-finite one, which the policy handles
and the counters show. One read of the gradients cannot cover more of float32.
"""

from typing import Any

import jax
import jax.numpy as jnp

_PRESCALE = 2.0**16


def sum_squares(x: Any, kept_axes: tuple[int, ...] = ()) -> jax.Array:
    """Pre-scaled sum of ``|x|**2`` over all axes but ``kept_axes``, in float32."""
    x = jnp.asarray(x)
    reduced = tuple(axis for axis in range(x.ndim) if axis not in kept_axes)
    if jnp.iscomplexobj(x):
        return _sum_squares(x.real, reduced) + _sum_squares(x.imag, reduced)
    return _sum_squares(x, reduced)


def to_norm(squares: jax.Array) -> jax.Array:
    """The norm that belongs to a pre-scaled sum of squares."""
    return jnp.sqrt(squares) * (1.0 / _PRESCALE)


def scale_leaf(x: Any, scale: jax.Array) -> jax.Array:
    """``scale * x`` in ``x``'s dtype; ``scale`` broadcasts against ``x``.

    A scale of exactly one hands every bit through (denormal numbers included, which
    a product would flush to zero), and a scale of exactly zero gives zeros even
    where ``x`` is not finite.
    """
    x = jnp.asarray(x)
    product = _scale_complex(x, scale) if jnp.iscomplexobj(x) else _scale(x, scale)
    return jnp.where(
        scale == 1.0, x, jnp.where(scale == 0.0, jnp.zeros_like(x), product)
    )


def _sum_squares(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    wide = x.astype(_compute_dtype(x))
    return jnp.sum(jnp.square(wide * _PRESCALE), axis=axes).astype(jnp.float32)


def _scale(x: jax.Array, scale: jax.Array) -> jax.Array:
    dtype = _compute_dtype(x)
    # The product is rounded once: a small scale would underflow in float16.
    return (x.astype(dtype) * scale.astype(dtype)).astype(x.dtype)


def _scale_complex(x: jax.Array, scale: jax.Array) -> jax.Array:
    return jax.lax.complex(_scale(x.real, scale), _scale(x.imag, scale))


def _compute_dtype(x: jax.Array) -> Any:
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32
