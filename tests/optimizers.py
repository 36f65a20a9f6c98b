"""Optimizers of many kinds, and states of theirs that show where every number is."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import adagc_jax as aj

PARAMS: dict[str, Any] = {
    "embed": jnp.full((4, 2), 0.5),
    "head": jnp.ones((2, 3)),
    "layers": {"w": jnp.ones((3, 2, 2))},
}
PER_LAYER = aj.stacked({"layers": 0})
EMBED_ALONE = {"embed": "a", "head": "b", "layers": {"w": "b"}}


def by_label(a: Any, b: Any) -> Any:
    return optax.partition({"a": a, "b": b}, EMBED_ALONE)


OPTIMIZERS: dict[str, Any] = {
    "global norm": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "adagc": optax.chain(aj.adagc(), optax.adamw(1e-3)),
    "stacked": optax.chain(aj.adagc(groups=PER_LAYER), optax.adamw(lambda _: 1e-3)),
    "whole tree": optax.chain(aj.adagc(groups=aj.whole_tree()), optax.adamw(1e-3)),
    "zclip": optax.chain(aj.zclip(groups=aj.per_tensor()), optax.adamw(1e-3)),
    "masked": optax.chain(
        optax.masked(aj.adagc(), {"embed": False, "head": True, "layers": True}),
        optax.scale_by_adam(),
        optax.scale(-1e-3),
    ),
    "guard": aj.guard(optax.chain(aj.adagc(), optax.adamw(1e-3))),
    "wrapped": optax.MultiSteps(
        optax.inject_hyperparams(lambda lr: optax.chain(aj.adagc(), optax.adam(lr)))(
            lr=1e-3
        ),
        2,
    ),
    "partition": by_label(
        optax.chain(aj.adagc(groups=aj.per_tensor()), optax.adam(1e-3)),
        aj.guard(optax.chain(aj.adagc(), optax.adam(1e-4))),
    ),
}


def numbered(state: Any, start: int = 1000) -> Any:
    """The same state with another number in every element, from ``start``."""
    count = itertools.count(start)

    def numbers(x: Any) -> jax.Array:
        if x.dtype == bool:
            return x
        values = [next(count) for _ in range(x.size)]
        return jnp.asarray(np.reshape(values, x.shape), x.dtype)

    return jax.tree.map(numbers, state)


@functools.cache
def initial(name: str) -> Any:
    return jax.jit(OPTIMIZERS[name].init)(PARAMS)
