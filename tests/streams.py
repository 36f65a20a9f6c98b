"""What the case tests share: every method, and its replay over a stream of gradients.

A stream is a gradient tree whose leaves have the updates along axis 0. It is replayed
by one ``lax.scan``, so a test sees the emitted gradients and the state of *every*
update for the price of one compilation.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from compiling import AS_USERS

import adagc_jax
from adagc_jax import per_tensor, stacked, whole_tree

# optax types updates as a recursive union, which no test wants to take apart.
Clip = Any
Factory = Callable[..., Clip]
WARMUP = 3

_adagc = functools.partial(
    adagc_jax.adagc, lambda_rel=1.05, beta=0.98, lambda_abs=1e9, warmup_steps=WARMUP
)
_zclip = functools.partial(adagc_jax.zclip, warmup_steps=WARMUP, max_grad_norm=None)

METHODS: dict[str, Factory] = {
    "adagc": _adagc,
    "adagc_ema": functools.partial(_adagc, warmup_init="ema"),
    "adagc_global": functools.partial(_adagc, groups=whole_tree()),
    "agc": functools.partial(adagc_jax.agc, 0.1),
    "agc_tensor": functools.partial(adagc_jax.agc, 0.1, unit="tensor"),
    "global_gc": functools.partial(adagc_jax.global_gc, 1.0),
    "tensor_gc": functools.partial(adagc_jax.tensor_gc, 1.0),
    "zclip": _zclip,
    "zclip_tensor": functools.partial(_zclip, groups=per_tensor()),
}
WITH_MEMORY = ["adagc", "adagc_ema", "adagc_global", "zclip", "zclip_tensor"]
WHOLE = ["adagc_global", "global_gc", "zclip"]
LOCAL = [name for name in METHODS if name not in WHOLE]
STACKED: dict[str, Factory] = {
    "adagc": functools.partial(_adagc, groups=stacked(0)),
    "adagc_ema": functools.partial(_adagc, warmup_init="ema", groups=stacked(0)),
    "agc": functools.partial(adagc_jax.agc, 0.1, stacked=0),
    "tensor_gc": functools.partial(adagc_jax.tensor_gc, 1.0, groups=stacked(0)),
    "zclip": functools.partial(_zclip, groups=stacked(0)),
}


@functools.cache
def method(name: str) -> Clip:
    """One instance per method, so that equal streams compile once for all tests."""
    return METHODS[name]()


class Replay(NamedTuple):
    """Emitted gradients and states, each with the updates along axis 0."""

    emitted: Any
    states: Any


def replay(clip: Clip, stream: Any, params: Any = None) -> Replay:
    """Runs ``clip`` from its initial state over ``stream``; arrays are NumPy's."""
    return Replay(*jax.device_get(replay_on_devices(clip, stream, params)))


def scan_updates(clip: Clip, stream: Any, params: Any) -> tuple[Any, Any]:
    """What `replay` compiles; its results stay where they are computed."""

    def step(state: Any, grads: Any) -> tuple[Any, Any]:
        emitted, state = clip.update(grads, state, params)
        return state, (emitted, state)

    first = jax.tree.map(lambda x: x[0], stream)
    return jax.lax.scan(step, clip.init(first if params is None else params), stream)[1]


replay_on_devices = jax.jit(scan_updates, static_argnums=0)
# The sums of quickly compiled code are less exact.
replay_as_users = jax.jit(scan_updates, static_argnums=0, compiler_options=AS_USERS)


def of_norms(
    norms: Sequence[float] | np.ndarray, shape: tuple[int, ...], dtype: Any = "float32"
) -> jax.Array:
    """One gradient per norm, ``(len(norms), *shape)``.

    Four elements of half the norm each, where there is room: exact in every dtype that
    represents the half, unlike a gradient spread evenly.
    """
    unit = np.zeros(math.prod(shape))
    unit[:4] = 1.0 / math.sqrt(min(4, unit.size))
    steps = np.asarray(norms, np.float64).reshape(-1, 1) * unit
    return jnp.asarray(steps.reshape(-1, *shape), dtype)


def noise(steps: int, *, seed: int = 0) -> dict[str, jax.Array]:
    """A stream of two tensors, in bfloat16 and float32, whose norms vary."""
    rng = np.random.default_rng(seed)
    return {
        "a": jnp.asarray(rng.normal(size=(steps, 3, 2)), jnp.bfloat16),
        "b": jnp.asarray(rng.normal(size=(steps, 4)), jnp.float32),
    }


def spiky() -> dict[str, jax.Array]:
    """A float32 stream with a spike; several optimizers keep the parameters' dtype."""
    stream = jax.tree.map(lambda x: x.astype(jnp.float32), noise(8))
    return stream | {"a": stream["a"].at[5].multiply(20.0)}


def first(stream: Any) -> Any:
    """The first gradient of a stream, with the shapes and dtypes of parameters."""
    return jax.tree.map(lambda x: x[0], stream)


def ones_like_first(stream: Any) -> Any:
    """Parameters for a stream."""
    return jax.tree.map(jnp.ones_like, first(stream))


def norms_of(x: Any, axes: tuple[int, ...] | None = None) -> np.ndarray:
    """Norm at each update, in float64; ``axes`` default to all but the first."""
    wide = np.asarray(x).astype(np.float64)
    axes = tuple(range(1, wide.ndim)) if axes is None else axes
    return np.sqrt(np.sum(wide**2, axis=axes))


def rule_state(states: Any) -> Any:
    """The state of the first rule of a clipper."""
    return states.stages[0].rule


def assert_same(got: Any, want: Any) -> None:
    """Trees with the same structure, dtypes and bits (NaN equals NaN)."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, x), y in zip(
        jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype, jax.tree_util.keystr(path)
        np.testing.assert_array_equal(
            x.view(np.uint8) if x.ndim and x.size else x,
            y.view(np.uint8) if y.ndim and y.size else y,
            err_msg=jax.tree_util.keystr(path),
        )


def assert_close(got: Any, want: Any, rtol: float = 1e-6) -> None:
    """Trees with the same structure and nearly the same numbers."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, x), y in zip(
        jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        np.testing.assert_allclose(
            np.asarray(x).astype(np.float64),
            np.asarray(y).astype(np.float64),
            rtol=rtol,
            atol=1e-30,
            err_msg=jax.tree_util.keystr(path),
        )
