"""The kernels in plain JAX: the default, and the reference that the others must equal.

`steady_scale` and `steady_gamma` are AdaGC's rule after warm-up. Every backend calls
them, the TPU kernels from inside, so that none has a rule of its own.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from adagc_jax import norms
from adagc_jax.rules import shrink_to

_MANTISSA_BITS = 23
_EXPONENT_MASK = 0xFF
_TWICE_BIAS = 254


class Hypers(NamedTuple):
    """Hyper-parameters of the rule as f32[] each, traced or not.

    Attributes:
      lambda_rel: How far above its reference a norm may be.
      weight: ``1 - beta``, of the new norm in the reference.
      eps: Added to the norm that is divided by.
    """

    lambda_rel: Any
    weight: Any
    eps: Any


def sums(x: jax.Array, keep: tuple[int, ...], scale: jax.Array | None) -> jax.Array:
    """Sums of ``(scale * x)**2`` over all axes but ``keep``, in float32."""
    if scale is None:
        return norms.sum_squares(x, keep)
    return norms.sum_squares(_wide(x) * over(scale, x.ndim, keep), keep)


def clip(
    x: jax.Array, gamma: jax.Array, hypers: Hypers, keep: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """``x`` clipped by the steady rule, and its sums of squares."""
    squares = norms.sum_squares(x, keep)
    factor = steady_scale(squares, gamma, hypers)
    return scale(x, factor, keep), squares


def scale(x: jax.Array, factor: jax.Array, keep: tuple[int, ...]) -> jax.Array:
    """``x`` times a factor per kept slice."""
    return norms.scale_leaf(x, over(factor, x.ndim, keep))


def steady_scale(squares: Any, gamma: Any, hypers: Hypers) -> jax.Array:
    """``min(1, limit / (n + eps))``; 1 for a zero norm and 0 for a non-finite one."""
    norm = root(squares)
    scale = shrink_to(hypers.lambda_rel * gamma, norm, hypers.eps)
    # A comparison that NaN fails, and that Mosaic knows.
    return jnp.where(norm < jnp.inf, jnp.where(norm > 0.0, scale, 1.0), 0.0)


def steady_gamma(norm: jax.Array, gamma: jax.Array, hypers: Hypers) -> jax.Array:
    """``gamma + (1 - beta) (min(n, limit) - gamma)``; a norm of 0 or inf is none."""
    clipped = jnp.minimum(norm, hypers.lambda_rel * gamma)
    active = (norm > 0.0) & (norm < jnp.inf)
    return jnp.where(active, gamma + hypers.weight * (clipped - gamma), gamma)


def root(squares: jax.Array) -> jax.Array:
    """The square root, with a derivative of 0 at 0."""
    zero = squares == 0.0
    return jnp.where(zero, 0.0, jnp.sqrt(jnp.where(zero, 1.0, squares)))


def power_of_two(reference: jax.Array) -> jax.Array:
    """The power of two that brings a float32 next to 1, from its exponent bits alone.

    Products with it are exact. It is 1 for zero, denormal and non-finite references.
    """
    bits = jax.lax.bitcast_convert_type(reference, jnp.uint32)
    exponent = (bits >> _MANTISSA_BITS) & jnp.uint32(_EXPONENT_MASK)
    usable = (exponent > 0) & (exponent < _TWICE_BIAS)
    inverse = (jnp.uint32(_TWICE_BIAS) - exponent) << _MANTISSA_BITS
    scale = jax.lax.bitcast_convert_type(inverse, jnp.float32)
    return jax.lax.stop_gradient(jnp.where(usable, scale, 1.0))


def over(value: jax.Array, ndim: int, keep: tuple[int, ...]) -> jax.Array:
    """A value per kept slice, shaped to broadcast against the array."""
    return jnp.expand_dims(value, tuple(a for a in range(ndim) if a not in keep))


def _wide(x: jax.Array) -> jax.Array:
    complex_ = jnp.iscomplexobj(x)
    return x if complex_ or x.dtype == jnp.float64 else x.astype(jnp.float32)
