"""AdaGC in plain JAX: the whole training is one `lax.scan`.

    python examples/frameworks/plain_scan_train.py

The optimizer state is part of the carry, and the clipper's numbers of every step come
out stacked, without a word to the host in between.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _toy import LAYERS, WIDTH, arguments, batches, optimizer, show

import adagc_jax


def init_params(seed: int = 0) -> dict[str, Any]:
    """Stacked layers and a head."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape, scale=WIDTH**-0.5), jnp.float32)

    return {"layers": {"w": normal(LAYERS, WIDTH, WIDTH)}, "head": normal(WIDTH, 1)}


def loss_fn(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """The mean squared error."""

    def through(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return h + jnp.tanh(h @ w), None

    h, _ = jax.lax.scan(through, x, params["layers"]["w"])
    return jnp.mean((h @ params["head"] - jnp.sum(x, axis=-1, keepdims=True)) ** 2)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains and prints what the clipper did."""
    args = arguments(__doc__, argv)
    tx = optimizer(adagc_jax.stacked({"^layers/": 0}))

    def train_step(carry: tuple[Any, Any], x: jax.Array) -> tuple[Any, Any]:
        params, state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, state = tx.update(grads, state, params)
        metrics = adagc_jax.clip_metrics(state, params)
        return (optax.apply_updates(params, updates), state), (loss, metrics)

    @jax.jit
    def train(params: Any, data: jax.Array) -> tuple[Any, Any]:
        return jax.lax.scan(train_step, (params, tx.init(params)), data)

    data = jnp.asarray(batches(args.steps, args.bad_step))
    (_, state), (losses, metrics) = train(init_params(), data)
    show("plain scan", losses.tolist(), args.bad_step, state)
    if 0 <= args.bad_step < args.steps:
        before = float(metrics["clip/norm_before"][args.bad_step])
        after = float(metrics["clip/norm_after"][args.bad_step])
        print(f"in step {args.bad_step} the norm went from {before:.3g} to {after:.3g}")


if __name__ == "__main__":
    main()
