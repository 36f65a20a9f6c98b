"""AdaGC in Equinox: only the arrays of a filtered tree are clipped and trained.

    pip install equinox
    python examples/frameworks/equinox_train.py

`eqx.filter` leaves functions and numbers of the module out as None, and the optimizer
sees the rest. Layers made by `eqx.filter_vmap` are stacked on axis 0.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from _toy import LAYERS, WIDTH, arguments, batches, optimizer, show

import adagc_jax

try:
    import equinox as eqx
except ImportError as error:
    raise SystemExit("equinox is missing: pip install equinox") from error


class Model(eqx.Module):
    """Stacked residual layers and a head."""

    layers: eqx.nn.Linear
    head: eqx.nn.Linear
    activation: Any

    def __init__(self, key: jax.Array):
        first, second = jax.random.split(key)
        make = eqx.filter_vmap(
            lambda k: eqx.nn.Linear(WIDTH, WIDTH, use_bias=False, key=k)
        )
        self.layers = make(jax.random.split(first, LAYERS))
        self.head = eqx.nn.Linear(WIDTH, 1, key=second)
        self.activation = jnp.tanh

    def __call__(self, x: jax.Array) -> jax.Array:
        arrays, static = eqx.partition(self.layers, eqx.is_array)

        def through(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            return x + self.activation(eqx.combine(layer, static)(x)), None

        return self.head(jax.lax.scan(through, x, arrays)[0])


def loss_fn(model: Model, x: jax.Array) -> jax.Array:
    """The mean squared error."""
    target = jnp.sum(x, axis=-1, keepdims=True)
    return jnp.mean((jax.vmap(model)(x) - target) ** 2)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains and prints what the clipper did."""
    args = arguments(__doc__, argv)
    model = Model(jax.random.key(0))
    tx = optimizer(adagc_jax.stacked({"^layers/": 0}))
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def train_step(model: Model, state: Any, x: jax.Array) -> tuple[Model, Any, Any]:
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = tx.update(grads, state, params)
        return eqx.apply_updates(model, updates), state, loss

    losses = []
    for x in batches(args.steps, args.bad_step):
        model, state, loss = train_step(model, state, x)
        losses.append(float(loss))
    show("equinox", losses, args.bad_step, state)


if __name__ == "__main__":
    main()
