"""Every kernel against float64 on the host, and whole optimizers against XLA."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _gpu_report import Entry, Pending

import adagc_jax
from adagc_jax import kernels

SHAPES = ((256, 384), (1000, 129), (3, 257, 128))
DTYPES = ("float32", "bfloat16", "float16")
# Sums in float32 of products in float32.
TOLERANCE = 2e-6


def checks(named: list[kernels.Backend], tiny: bool) -> Iterator[Pending]:
    """One per kernel, backend, shape and dtype: how far off it is, and if right."""
    shapes, dtypes = (SHAPES[:2], DTYPES[:1]) if tiny else (SHAPES, DTYPES)
    for backend in named:
        for dtype in dtypes:
            arrays = [_array(shape, dtype) for shape in shapes]
            served = [x for x in arrays if not kernels.why_not(x, backend=backend.name)]
            for x in served:
                for check in (_sum_squares, _norm, _fused_clip):
                    yield _pending(check, x, _named(x), backend)
            if served:
                of = [_named(x) for x in arrays]
                yield _pending(_sums_of_squares, arrays, of, backend)
                yield _pending(_adagc_adamw, arrays, of, backend)


def _pending(check: Any, arrays: Any, of: Any, by: kernels.Backend) -> Pending:
    def measure() -> Entry:
        apart, allowed = check(arrays, by)
        return {"apart": apart, "allowed": allowed, "right": bool(apart <= allowed)}

    name = check.__name__.removeprefix("_")
    return {"check": name, "backend": by.name, "of": of}, measure


def _array(shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(len(shape)), shape, jnp.dtype(dtype))


def _named(x: jax.Array) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _exact(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64)


def _apart(got: Any, want: Any) -> float:
    """Largest difference, relative to the largest value wanted."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.max(np.abs(got - want)) / np.max(np.abs(want)))


def _rounding(x: jax.Array) -> float:
    """Of the dtype of gradients, in which what is emitted is rounded."""
    return float(jnp.finfo(x.dtype).eps)


def _run(function: Any, by: kernels.Backend, *args: Any, **kw: Any) -> Any:
    kw |= {"backend": by.name, "interpret": by.interpret}
    return jax.jit(functools.partial(function, **kw))(*args)


def _sum_squares(x: jax.Array, by: kernels.Backend) -> tuple[float, float]:
    got = _run(kernels.sum_squares, by, x)
    return _apart(got, np.sum(_exact(x) ** 2)), TOLERANCE


def _norm(x: jax.Array, by: kernels.Backend) -> tuple[float, float]:
    """Of values whose squares leave float32, where the dtype has such values."""
    exponent = 10 if x.dtype == jnp.float16 else 80
    large = x * jnp.asarray(2.0**exponent, x.dtype)
    reference = jnp.float32(2.0 ** (exponent + 8))
    got = _run(kernels.norm, by, large, reference=reference)
    return _apart(got, np.linalg.norm(_exact(large).ravel())), TOLERANCE


def _fused_clip(x: jax.Array, by: kernels.Backend) -> tuple[float, float]:
    before = np.linalg.norm(_exact(x).ravel())
    gamma = np.float32(before / 10)
    got, _, _ = _run(
        kernels.fused_clip, by, x, jnp.asarray(gamma), lambda_rel=1.04, beta=0.99
    )
    want = _exact(x) * (1.04 * float(gamma) / before)
    return _apart(got, want), TOLERANCE + _rounding(x)


def _sums_of_squares(
    arrays: list[jax.Array], by: kernels.Backend
) -> tuple[float, float]:
    got = jax.jit(functools.partial(kernels.sums_of_squares, backend=by))(arrays)
    return _apart(got, [np.sum(_exact(x) ** 2) for x in arrays]), TOLERANCE


def _adagc_adamw(arrays: list[jax.Array], by: kernels.Backend) -> tuple[float, float]:
    """Two updates of AdaGC and AdamW together against the chain of both in XLA."""
    params = [jnp.ones(x.shape, jnp.float32) for x in arrays]
    clip: dict[str, Any] = {"phase": "steady", "groups": adagc_jax.per_tensor()}
    fused = kernels.adagc_adamw(1e-2, backend=by, **clip)
    chain = optax.chain(adagc_jax.adagc(**clip), optax.adamw(1e-2))
    outs = [_two_updates(optimizer, arrays, params) for optimizer in (fused, chain)]
    apart = max(_apart(a, b) for a, b in zip(*outs, strict=True))
    # A scale that is off by one bit rounds some clipped gradients the other way.
    return apart, 1e-5 + _rounding(arrays[0])


def _two_updates(optimizer: Any, grads: Any, params: Any) -> Any:
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    _, state = update(grads, state, params)
    spike = [10 * g for g in grads]
    return update(spike, state, params)[0]
