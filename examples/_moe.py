"""A small Mixtral-style decoder in plain JAX, with its layers and experts stacked.

Every parameter of the layers is one array ``[layers, ...]``, those of the experts
``[layers, experts, ...]``; the forward pass is one `jax.lax.scan` over layers.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

VOCAB = 256
TOP = 2

# Which mesh axis splits which dimension.
SPECS = {
    "embed": P("tensor", "fsdp"),
    "layers": {
        "norm1": P(None, None),
        "norm2": P(None, None),
        "qkv": P(None, "fsdp", "tensor"),
        "out": P(None, "tensor", "fsdp"),
        "router": P(None, None, None),
        "experts": {
            "gate": P(None, "expert", "fsdp", "tensor"),
            "up": P(None, "expert", "fsdp", "tensor"),
            "down": P(None, "expert", "tensor", "fsdp"),
        },
    },
    "norm": P(None),
    "head": P("fsdp", "tensor"),
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the model."""

    layers: int = 3
    experts: int = 4
    width: int = 64
    hidden: int = 128
    heads: int = 4


def init(key: jax.Array, sizes: Sizes) -> dict[str, Any]:
    """Parameters; matrices are normal with variance 1 / inputs."""
    layers, experts, width = sizes.layers, sizes.experts, sizes.width
    shapes = {
        "embed": (VOCAB, width),
        "qkv": (layers, width, 3 * width),
        "out": (layers, width, width),
        "router": (layers, width, experts),
        "gate": (layers, experts, width, sizes.hidden),
        "up": (layers, experts, width, sizes.hidden),
        "down": (layers, experts, sizes.hidden, width),
        "head": (width, VOCAB),
    }
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    w = {
        name: jax.random.normal(keys[name], shape) * shape[-2] ** -0.5
        for name, shape in shapes.items()
    }
    ones = jnp.ones((layers, width))
    return {
        "embed": w["embed"],
        "layers": {
            "norm1": ones,
            "norm2": ones,
            **{name: w[name] for name in ("qkv", "out", "router")},
            "experts": {name: w[name] for name in ("gate", "up", "down")},
        },
        "norm": jnp.ones(width),
        "head": w["head"],
    }


def loss(params: dict[str, Any], tokens: jax.Array, sizes: Sizes) -> jax.Array:
    """Mean next-byte cross-entropy of ``tokens`` [batch, time + 1], in nats."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = params["embed"][inputs]

    def layer(x: jax.Array, p: dict[str, Any]) -> tuple[jax.Array, None]:
        x = x + _attention(_rms_norm(x, p["norm1"]), p, sizes.heads)
        return x + _experts(_rms_norm(x, p["norm2"]), p), None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    logits = _rms_norm(x, params["norm"]) @ params["head"]
    return optax.losses.softmax_cross_entropy_with_integer_labels(
        logits, targets
    ).mean()


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def _attention(x: jax.Array, p: dict[str, Any], heads: int) -> jax.Array:
    q, k, v = (
        part.reshape(*x.shape[:2], heads, -1)
        for part in jnp.split(x @ p["qkv"], 3, axis=-1)
    )
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return mixed.reshape(x.shape) @ p["out"]


def _experts(x: jax.Array, p: dict[str, Any]) -> jax.Array:
    """Every token through its best experts, weighted by the router."""
    weight = routing_weights(x @ p["router"])
    e = p["experts"]
    return mixture(x, weight, e["gate"], e["up"], e["down"])


def routing_weights(logits: jax.Array) -> jax.Array:
    """Softmax over the `TOP` best experts of each token, zero elsewhere."""
    kth = jax.lax.top_k(logits, TOP)[0][..., -1:]
    return jax.nn.softmax(jnp.where(logits >= kth, logits, -jnp.inf), axis=-1)


def mixture(
    x: jax.Array, weight: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    """SwiGLU of every expert [experts, ...] on every token, summed by `weight`."""
    hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x, gate))
    hidden = hidden * jnp.einsum("btd,edf->btef", x, up)
    return jnp.einsum("btef,efd,bte->btd", hidden, down, weight)
