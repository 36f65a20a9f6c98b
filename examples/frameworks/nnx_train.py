"""AdaGC in Flax NNX: `nnx.Optimizer`, layers scanned by `nnx.scan`.

    python examples/frameworks/nnx_train.py

Each scanned layer has a reference of its own: `stacked_from_metadata` reads the axis
from the name that `nnx.vmap` gives it.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from _toy import LAYERS, WIDTH, arguments, batches, optimizer, show
from flax import nnx

import adagc_jax

NAMED = {nnx.PARTITION_NAME: "layers"}


class Model(nnx.Module):
    """Scanned residual layers and a head."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(transform_metadata=NAMED)
        def make(rngs: nnx.Rngs) -> nnx.Linear:
            kernel = nnx.with_partitioning(
                nnx.initializers.lecun_normal(), (None, None)
            )
            return nnx.Linear(
                WIDTH, WIDTH, use_bias=False, kernel_init=kernel, rngs=rngs
            )

        self.layers = make(rngs)
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, transform_metadata=NAMED)
        def through(x: jax.Array, layer: nnx.Linear) -> jax.Array:
            return x + jnp.tanh(layer(x))

        return self.head(through(x, self.layers))


@nnx.jit
def train_step(model: Model, opt: nnx.Optimizer, x: jax.Array) -> jax.Array:
    """One step in place; returns the loss."""

    def loss_fn(model: Model) -> jax.Array:
        return jnp.mean((model(x) - jnp.sum(x, axis=-1, keepdims=True)) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    opt.update(model, grads)
    return loss


def main(argv: Sequence[str] | None = None) -> None:
    """Trains and prints what the clipper did."""
    args = arguments(__doc__, argv)
    # Names without a mesh: they tell the layers apart, and place nothing.
    with nnx.use_eager_sharding(False):
        model = Model(nnx.Rngs(0))
    groups = adagc_jax.stacked_from_metadata(nnx.state(model, nnx.Param))
    opt = nnx.Optimizer(model, optimizer(groups), wrt=nnx.Param)
    data = batches(args.steps, args.bad_step)
    losses = [float(train_step(model, opt, x)) for x in data]
    show("nnx", losses, args.bad_step, opt.opt_state)


if __name__ == "__main__":
    main()
