"""Trains all settings of a rule, on all seeds, in one compiled program."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from _model import next_byte_loss, training_loss
from flax import nnx
from rules import Rule
from scenarios import Data
from setups import Setup

# The tensor whose gradients are at fault where one tensor's are.
FAULTY = "layers/1/mlp/up"


class Outcome(NamedTuple):
    """Of [settings, seeds] runs.

    Attributes:
      losses: [settings, seeds, steps], of the batch of each step.
      clipped: Likewise, the fraction of tensors whose gradient was made smaller.
      validation: [settings, seeds], of the parameters at the end.
    """

    losses: Any
    clipped: Any
    validation: Any


def new_run(setup: Setup, rule: Rule) -> Any:
    """The compiled function from settings, parameters and data to an `Outcome`."""
    structure, params = setup.model(0)
    if not any(map(_is_faulty, dict(jax.tree_util.tree_leaves_with_path(params)))):
        raise ValueError(f"{setup.name} has no tensor {FAULTY!r} to put a fault into")
    optimizer = setup.new_optimizer()

    def loss_of(loss: Any, params: Any, inputs: Any, targets: Any) -> jax.Array:
        model = nnx.merge(structure, setup.computed(params))
        return loss(model, inputs, targets).astype(jnp.float32)

    def run(values: Any, params: Any, data: Data) -> Outcome:
        clipper = rule.clipper(values, setup.groups)

        def step(carry: Any, row: Any) -> Any:
            params, clip_state, opt_state = carry
            inputs, targets, loss_scale, fault, lr = row
            loss, grads = jax.value_and_grad(functools.partial(loss_of, training_loss))(
                params, inputs, targets
            )
            grads = _spoil(setup.computed(grads), loss_scale, fault)
            clipped, clip_state = clipper.update(grads, clip_state, params)
            updates, opt_state = optimizer.update(clipped, opt_state, params)
            factor = lr * setup.peak_lr
            updates = jax.tree.map(lambda u: u * factor, updates)
            params = optax.apply_updates(params, updates)
            return (params, clip_state, opt_state), (loss, _reduced(grads, clipped))

        start = params, clipper.init(params), optimizer.init(params)
        (params, _, _), (losses, reduced) = jax.lax.scan(step, start, data[:5])
        validation = loss_of(
            next_byte_loss, params, data.validation_inputs, data.validation_targets
        )
        return Outcome(losses, reduced, validation)

    over_seeds = jax.vmap(run, in_axes=(None, 0, 0))
    return jax.jit(jax.vmap(over_seeds, in_axes=(0, None, None)))


def _spoil(grads: Any, loss_scale: jax.Array, fault: jax.Array) -> Any:
    """The gradients of a scaled loss, those of one tensor scaled once more."""

    def scale(path: Any, g: jax.Array) -> jax.Array:
        factor = loss_scale * fault if _is_faulty(path) else loss_scale
        return g * factor.astype(g.dtype)

    return jax.tree_util.tree_map_with_path(scale, grads)


def _is_faulty(path: Any) -> bool:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return name.startswith(FAULTY)


def _reduced(before: Any, after: Any) -> jax.Array:
    """The fraction of tensors whose norm clipping has made smaller."""

    def smaller(g: jax.Array, c: jax.Array) -> jax.Array:
        was, now = (jnp.sum(jnp.square(x.astype(jnp.float32))) for x in (g, c))
        return now < 0.999999 * was

    flags = jax.tree.leaves(jax.tree.map(smaller, before, after))
    return jnp.mean(jnp.stack(flags).astype(jnp.float32))
