"""Losses of the models of `models`, for whole training steps.

Rotary positions are left out: they have no weights, and nothing here is trained.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from models import Dense, Model

HEAD = 64  # width of an attention head


def loss(model: Model, params: Any, tokens: jax.Array) -> jax.Array:
    """A loss on ``tokens``, i32[batch, time]; layers listed."""
    if isinstance(model, Dense):
        return _dense_loss(model, params, tokens)
    return _llama_loss(params, tokens)


def _dense_loss(model: Dense, params: Any, tokens: jax.Array) -> jax.Array:
    """Mean square of what comes out for one-hot tokens."""
    weights = list(params["layers"].values())
    x = jax.nn.one_hot(tokens[:, :-1].reshape(-1), model.width, dtype=weights[0].dtype)
    for weight in weights:
        x = x + jax.nn.silu(x @ weight)
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def _llama_loss(params: Any, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next token."""
    x = params["embed"][tokens[:, :-1]]
    for weights in params["layers"].values():
        x = _layer(weights, x)
    logits = _norm(x, params["norm"]) @ params["head"]
    return jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), tokens[:, 1:]
        )
    )


def _layer(w: Any, x: jax.Array) -> jax.Array:
    y = _norm(x, w["norm1"])
    q, k, v = (_heads(y @ w[name]) for name in ("q", "k", "v"))
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + attended.reshape(x.shape) @ w["o"]
    y = _norm(x, w["norm2"])
    return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]


def _heads(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-1], -1, HEAD)


def _norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype) * weight
