"""Reduce and scale: the only two places where gradients are touched.

Sums of squares are accumulated in float32 whatever the leaf's dtype and travel as
squares, so that partial sums can be pooled before the one square root.

Range. One read of the gradients cannot cover all of float32 squared: an element below
about 1e-19 counts as zero, so a tensor of nothing else is *idle* (handed through, and
visible in the count of active updates), and a norm above 1.8e19 is infinite, an event
that the non-finite policy handles and counts. Scaling elements before they are squared
would only move this window, and costs XLA's CPU backend a second read: it materialises
the constant.
"""

from typing import Any

import jax
import jax.numpy as jnp


def sum_squares(x: Any, kept_axes: tuple[int, ...] = ()) -> jax.Array:
    """Sum of ``|x|**2`` over all axes but ``kept_axes``, in float32."""
    x = jnp.asarray(x)
    reduced = tuple(axis for axis in range(x.ndim) if axis not in kept_axes)
    if jnp.iscomplexobj(x):
        total = _sum_squares(x.real, reduced) + _sum_squares(x.imag, reduced)
    else:
        total = _sum_squares(x, reduced)
    # Fused with what follows, a partial reduction is slow on CPU (the squares are
    # written out) and repeated on GPU. Alone, it is one read.
    return jax.lax.optimization_barrier(total) if kept_axes else total


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
    return jnp.sum(jnp.square(wide), axis=axes).astype(jnp.float32)


def _scale(x: jax.Array, scale: jax.Array) -> jax.Array:
    dtype = _compute_dtype(x)
    # The product is rounded once: a small scale would underflow in float16.
    return (x.astype(dtype) * scale.astype(dtype)).astype(x.dtype)


def _scale_complex(x: jax.Array, scale: jax.Array) -> jax.Array:
    return jax.lax.complex(_scale(x.real, scale), _scale(x.imag, scale))


def _compute_dtype(x: jax.Array) -> Any:
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32
