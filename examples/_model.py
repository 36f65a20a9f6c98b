"""Small decoders over bytes in Flax NNX: Llama, Qwen3 and Mixtral.

RMSNorm before each block, rotary positions, grouped-query attention, SwiGLU, no
biases, and an output head with weights of its own. Qwen3 normalises queries and keys
head by head; Mixtral has experts in place of the feed-forward block.
"""

import jax
import jax.numpy as jnp
import optax
from _moe import TOP, mixture, routing_weights
from flax import nnx

VOCAB = 256
# Mixtral's weight of the load-balancing loss.
BALANCE_WEIGHT = 0.02


def rotary(x: jax.Array, base: float = 10_000.0) -> jax.Array:
    """Rotates channel pairs of `x` [batch, time, heads, dim] by their position."""
    time, half = x.shape[1], x.shape[-1] // 2
    # In float32 for any model: bfloat16 has no odd numbers above 256.
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(time, dtype=jnp.float32)[:, None] * frequency[None, :]
    cos, sin = (f(angle)[None, :, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def linear(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    """A projection without bias."""
    return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)


class Attention(nnx.Module):
    """Causal attention in which several query heads share one key/value head."""

    def __init__(
        self, width: int, heads: int, kv_heads: int, qk_norm: bool, rngs: nnx.Rngs
    ):
        self.head_dim = width // heads
        self.q = linear(width, heads * self.head_dim, rngs)
        self.k = linear(width, kv_heads * self.head_dim, rngs)
        self.v = linear(width, kv_heads * self.head_dim, rngs)
        self.out = linear(heads * self.head_dim, width, rngs)
        self.q_norm = nnx.RMSNorm(self.head_dim, rngs=rngs) if qk_norm else None
        self.k_norm = nnx.RMSNorm(self.head_dim, rngs=rngs) if qk_norm else None

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (
            project(x).reshape(*x.shape[:2], -1, self.head_dim)
            for project in (self.q, self.k, self.v)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        mixed = jax.nn.dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
        return self.out(mixed.reshape(*x.shape[:2], -1))


class SwiGLU(nnx.Module):
    """The gated feed-forward block."""

    def __init__(self, width: int, hidden: int, rngs: nnx.Rngs):
        self.gate = linear(width, hidden, rngs)
        self.up = linear(width, hidden, rngs)
        self.down = linear(hidden, width, rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array | float]:
        return self.down(nnx.silu(self.gate(x)) * self.up(x)), 0.0


class Experts(nnx.Module):
    """Feed-forward blocks in one array per matrix; every token goes through two."""

    def __init__(self, width: int, hidden: int, experts: int, rngs: nnx.Rngs):
        draw = nnx.initializers.lecun_normal(batch_axis=0)
        self.router = linear(width, experts, rngs)
        self.gate = nnx.Param(draw(rngs.params(), (experts, width, hidden)))
        self.up = nnx.Param(draw(rngs.params(), (experts, width, hidden)))
        self.down = nnx.Param(draw(rngs.params(), (experts, hidden, width)))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array | float]:
        """The block's output, and its load-balancing loss, 1 when all share alike."""
        logits = self.router(x)
        weight = routing_weights(logits)
        share = jnp.mean((weight > 0).astype(x.dtype), axis=(0, 1)) / TOP
        probability = jnp.mean(jax.nn.softmax(logits), axis=(0, 1))
        balance = logits.shape[-1] * jnp.sum(share * probability)
        mixed = mixture(x, weight, self.gate[...], self.up[...], self.down[...])
        return mixed, balance


class Layer(nnx.Module):
    """Attention, then feed-forward, each normalised first and added to the stream."""

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        experts: int,
        qk_norm: bool,
        rngs: nnx.Rngs,
    ):
        self.attn_norm = nnx.RMSNorm(width, rngs=rngs)
        self.attn = Attention(width, heads, kv_heads, qk_norm, rngs)
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs)
        self.mlp = (
            Experts(width, hidden, experts, rngs)
            if experts
            else SwiGLU(width, hidden, rngs)
        )

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array | float]:
        x = x + self.attn(self.attn_norm(x))
        out, balance = self.mlp(self.mlp_norm(x))
        return x + out, balance


class Decoder(nnx.Module):
    """Bytes [batch, time] to next-byte logits [batch, time, vocab].

    As in Llama; `qk_norm` makes it Qwen3's, `experts` Mixtral's.
    """

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        experts: int = 0,
        qk_norm: bool = False,
        vocab: int = VOCAB,
        rngs: nnx.Rngs,
    ):
        sizes = (width, heads, kv_heads, hidden, experts, qk_norm)
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.layers = nnx.List([Layer(*sizes, rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.unembed = linear(width, vocab, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.forward(tokens)[0]

    def forward(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array | float]:
        """Logits, and the load-balancing loss summed over layers."""
        x, total = self.embed(tokens), 0.0
        for layer in self.layers:
            x, balance = layer(x)
            total += balance
        return self.unembed(self.norm(x)), total


def next_byte_loss(model: Decoder, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats per byte, without the balance of the experts."""
    return _cross_entropy(model(inputs), targets)


def training_loss(model: Decoder, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """What is minimised: the cross-entropy, and with experts their balance."""
    logits, balance = model.forward(inputs)
    return _cross_entropy(logits, targets) + BALANCE_WEIGHT * balance


def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), targets
    )
    return jnp.mean(losses)
