"""A small Llama-style decoder over bytes in Flax NNX.

RMSNorm before each block, rotary positions, grouped-query attention, SwiGLU, no
biases, and an output head with weights of its own.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

VOCAB = 256


def rotary(x: jax.Array, base: float = 10_000.0) -> jax.Array:
    """Rotates channel pairs of `x` [batch, time, heads, dim] by their position."""
    time, half = x.shape[1], x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=x.dtype) / half)
    angle = jnp.arange(time, dtype=x.dtype)[:, None] * frequency[None, :]
    cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def linear(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    """A projection without bias."""
    return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)


class Attention(nnx.Module):
    """Causal attention in which several query heads share one key/value head."""

    def __init__(self, width: int, heads: int, kv_heads: int, rngs: nnx.Rngs):
        self.head_dim = width // heads
        self.q = linear(width, heads * self.head_dim, rngs)
        self.k = linear(width, kv_heads * self.head_dim, rngs)
        self.v = linear(width, kv_heads * self.head_dim, rngs)
        self.out = linear(heads * self.head_dim, width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (
            project(x).reshape(*x.shape[:2], -1, self.head_dim)
            for project in (self.q, self.k, self.v)
        )
        mixed = jax.nn.dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
        return self.out(mixed.reshape(*x.shape[:2], -1))


class SwiGLU(nnx.Module):
    """The gated feed-forward block."""

    def __init__(self, width: int, hidden: int, rngs: nnx.Rngs):
        self.gate = linear(width, hidden, rngs)
        self.up = linear(width, hidden, rngs)
        self.down = linear(hidden, width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    """Attention, then feed-forward, each normalised first and added to the stream."""

    def __init__(
        self, width: int, heads: int, kv_heads: int, hidden: int, rngs: nnx.Rngs
    ):
        self.attn_norm = nnx.RMSNorm(width, rngs=rngs)
        self.attn = Attention(width, heads, kv_heads, rngs)
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs)
        self.mlp = SwiGLU(width, hidden, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
    """Bytes [batch, time] to next-byte logits [batch, time, 256]."""

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        rngs: nnx.Rngs,
    ):
        self.embed = nnx.Embed(VOCAB, width, rngs=rngs)
        self.layers = nnx.List(
            [Layer(width, heads, kv_heads, hidden, rngs) for _ in range(layers)]
        )
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.unembed = linear(width, VOCAB, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.unembed(self.norm(x))


def next_byte_loss(model: Decoder, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats per byte."""
    logits = model(inputs)
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.mean(losses)
