"""From the settings to what is trained: parameters, and losses as functions of them.

With `--scan-layers` the layers are one stacked tree that `jax.lax.scan` runs through:
the same numbers as layer by layer, and a program whose size does not grow with depth.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _config import Config
from _data import Batch
from _model import Decoder, next_byte_loss, training_loss
from flax import nnx

LossFn = Callable[[Any, Batch], jax.Array]


@dataclasses.dataclass(frozen=True)
class Job:
    """What is minimised from where, and what is measured at the end.

    Attributes:
      initial: Parameters as a tree of arrays.
      loss_fn: Of parameters and a batch, what is minimised.
      validation_loss_fn: Likewise, the cross-entropy alone.
    """

    initial: Any
    loss_fn: LossFn
    validation_loss_fn: LossFn


class Scanned:
    """A decoder whose layers are one stacked tree."""

    def __init__(self, around: Decoder, layer: Any, stacked: Any):
        self._around, self._layer, self._stacked = around, layer, stacked

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.forward(tokens)[0]

    def forward(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logits, and the load-balancing loss summed over layers."""

        def step(x: jax.Array, params: Any) -> tuple[jax.Array, Any]:
            return nnx.merge(self._layer, params)(x)

        x, balances = jax.lax.scan(step, self._around.embed(tokens), self._stacked)
        return self._around.unembed(self._around.norm(x)), jnp.sum(balances)


def new_decoder(config: Config, **changes: int) -> Decoder:
    """The model of the settings, or one with another number of layers."""
    sizes = {"layers": config.layers} | changes
    decoder = Decoder(
        **sizes,
        width=config.width,
        heads=config.heads,
        kv_heads=config.kv_heads,
        hidden=config.hidden,
        experts=config.experts if config.model == "mixtral" else 0,
        qk_norm=config.model == "qwen",
        vocab=config.vocab,
        rngs=nnx.Rngs(config.seed),
    )
    # Else it would turn what it looks up into the type it was made with.
    decoder.embed.dtype = jnp.dtype(config.dtype)
    return decoder


def initial(config: Config) -> Any:
    """Parameters as a tree of arrays, layers stacked if they are scanned."""
    params = nnx.to_pure_dict(nnx.split(new_decoder(config))[1])
    if not config.scan_layers:
        return params
    layers = [params["layers"][i] for i in range(config.layers)]
    return params | {"layers": jax.tree.map(lambda *x: jnp.stack(x), *layers)}


def model_of(config: Config) -> Callable[[Any], Any]:
    """From parameters to the model as something to call."""
    if not config.scan_layers:
        structure = nnx.split(nnx.eval_shape(lambda: new_decoder(config)))[0]
        return lambda params: nnx.merge(structure, params)
    around = nnx.split(nnx.eval_shape(lambda: new_decoder(config, layers=0)))[0]
    one = nnx.eval_shape(lambda: new_decoder(config, layers=1))
    layer = nnx.split(one.layers[0])[0]

    def build(params: Any) -> Scanned:
        rest = params | {"layers": {}}
        return Scanned(nnx.merge(around, rest), layer, params["layers"])

    return build


def new_job(config: Config, start: Callable[[Config], Any] = initial) -> Job:
    """The model of the settings; `start` makes its parameters."""
    build = model_of(config)

    def of(loss: Any) -> LossFn:
        def loss_fn(params: Any, batch: Batch) -> jax.Array:
            computed = optax.tree.cast(params, config.dtype)
            return loss(build(computed), *batch).astype(jnp.float32)

        return loss_fn

    return Job(start(config), of(training_loss), of(next_byte_loss))


def count_parameters(config: Config) -> int:
    """How many numbers the model has, from shapes alone; nothing is allocated."""

    def count(layers: int) -> int:
        shapes = nnx.eval_shape(lambda: new_decoder(config, layers=layers))
        return sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(shapes)))

    # All layers are alike, and tracing a hundred of them takes long.
    none, one = count(0), count(1)
    return none + config.layers * (one - none)
