"""Low-rank adapters for the attention of a decoder, as a small tree of their own.

The base stays as it is and has no optimizer state. An adapter of a matrix W [in, out]
is a pair A [in, rank], B [rank, out], and the model runs with W + scale * A @ B.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Adapters = dict[str, dict[str, jax.Array]]

ATTENTION = r"attn/(q|k|v|out)/kernel$"


def _map(change: Callable[[str, jax.Array], jax.Array], params: Any) -> Any:
    def at(path: Any, x: jax.Array) -> jax.Array:
        return change(jax.tree_util.keystr(path, simple=True, separator="/"), x)

    return jax.tree_util.tree_map_with_path(at, params)


def new_adapters(params: Any, rank: int, seed: int) -> Adapters:
    """Adapters of all attention matrices; B is 0, so at first they change nothing.

    Raises:
      ValueError: If no parameter's path looks like attention.
    """
    found: dict[str, jax.Array] = {}
    _map(lambda path, x: found.setdefault(path, x), params)
    targets = {path: x for path, x in found.items() if re.search(ATTENTION, path)}
    if not targets:
        raise ValueError(f"params has no path like {ATTENTION!r}: {sorted(found)}")
    keys = jax.random.split(jax.random.key(seed), len(targets))
    return {
        path.removesuffix("/kernel"): {
            "a": jax.random.normal(key, (w.shape[0], rank), w.dtype)
            * w.shape[0] ** -0.5,
            "b": jnp.zeros((rank, w.shape[1]), w.dtype),
        }
        for key, (path, w) in zip(keys, targets.items(), strict=True)
    }


def merged(params: Any, adapters: Adapters, scale: float) -> Any:
    """The parameters with the adapters added."""

    def add(path: str, w: jax.Array) -> jax.Array:
        pair = adapters.get(path.removesuffix("/kernel"))
        return w if pair is None else w + scale * (pair["a"] @ pair["b"])

    return _map(add, params)


def scaled(params: Any, pattern: str, factor: jax.Array) -> Any:
    """The parameters, those whose path matches multiplied by the factor."""
    return _map(lambda path, w: w * factor if re.search(pattern, path) else w, params)
