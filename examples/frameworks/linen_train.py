"""AdaGC in Flax Linen: `TrainState`, layers scanned by `nn.scan`.

    python examples/frameworks/linen_train.py

`stacked_from_metadata` finds the axis that `nn.scan` named, so that each scanned layer
has a reference of its own.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from _toy import LAYERS, WIDTH, arguments, batches, optimizer, show
from flax import linen as nn
from flax.training.train_state import TrainState

import adagc_jax


class Layer(nn.Module):
    """A residual layer, as a step of `nn.scan`."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, None))
        dense = nn.Dense(WIDTH, use_bias=False, kernel_init=init)
        return x + jnp.tanh(dense(x)), None


class Model(nn.Module):
    """Scanned layers and a head."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = nn.scan(
            Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = layers(name="layers")(x, None)
        return nn.Dense(1)(x)


@jax.jit
def train_step(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
    """The next state, and the loss."""

    def loss_fn(params: Any) -> jax.Array:
        prediction = state.apply_fn({"params": params}, x)
        return jnp.mean((prediction - jnp.sum(x, axis=-1, keepdims=True)) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def main(argv: Sequence[str] | None = None) -> None:
    """Trains and prints what the clipper did."""
    args = arguments(__doc__, argv)
    model = Model()
    params = model.init(jax.random.key(0), jnp.ones((1, WIDTH)))["params"]
    tx = optimizer(adagc_jax.stacked_from_metadata(params))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    losses = []
    for x in batches(args.steps, args.bad_step):
        state, loss = train_step(state, x)
        losses.append(float(loss))
    show("linen", losses, args.bad_step, state.opt_state)


if __name__ == "__main__":
    main()
