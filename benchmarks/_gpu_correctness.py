"""Every kernel against float64 on the host, and whole optimizers against XLA."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import adagc_jax
from adagc_jax import kernels

SHAPES = ((256, 384), (1000, 129), (3, 257, 128))
DTYPES = ("float32", "bfloat16")
# Sums in float32 of products in float32.
TOLERANCE = 2e-6


def checks(named: list[kernels.Backend], tiny: bool) -> Iterator[dict[str, Any]]:
    """One entry per kernel, backend, shape and dtype: its error, and if it is right."""
    shapes, dtypes = (SHAPES[:2], DTYPES[:1]) if tiny else (SHAPES, DTYPES)
    for backend in named:
        for dtype in dtypes:
            arrays = [_array(shape, dtype) for shape in shapes]
            alone = [x for x in arrays if not kernels.why_not(x, backend=backend.name)]
            for x in alone:
                yield _sum_squares(x, backend)
                yield _norm(x, backend)
                yield _fused_clip(x, backend)
            yield _many(arrays, backend)
            yield _step(arrays, backend)


def _array(shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(len(shape)), shape, jnp.dtype(dtype))


def _exact(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64)


def _entry(
    name: str, backend: kernels.Backend, of: Any, error: float, tolerance: float
) -> dict[str, Any]:
    return {
        "check": name,
        "backend": backend.name,
        "of": of,
        "error": error,
        "right": bool(error <= tolerance),
    }


def _apart(got: Any, want: Any) -> float:
    """Largest difference, relative to the largest value wanted."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.max(np.abs(got - want)) / np.max(np.abs(want)))


def _named(x: jax.Array) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _sum_squares(x: jax.Array, by: kernels.Backend) -> dict[str, Any]:
    got = kernels.sum_squares(x, backend=by.name, interpret=by.interpret)
    error = _apart(got, np.sum(_exact(x) ** 2))
    return _entry("sum_squares", by, _named(x), error, TOLERANCE)


def _norm(x: jax.Array, by: kernels.Backend) -> dict[str, Any]:
    """Of values whose squares leave float32."""
    scale = jnp.asarray(2.0**80, x.dtype)
    large = x * scale
    reference = jnp.float32(2.0**88)
    got = kernels.norm(
        large, reference=reference, backend=by.name, interpret=by.interpret
    )
    error = _apart(got, np.linalg.norm(_exact(large).ravel()))
    return _entry("norm", by, _named(x), error, TOLERANCE)


def _fused_clip(x: jax.Array, by: kernels.Backend) -> dict[str, Any]:
    before = np.linalg.norm(_exact(x).ravel())
    gamma = np.float32(before / 10)
    got, _, _ = kernels.fused_clip(
        x,
        jnp.asarray(gamma),
        lambda_rel=1.04,
        beta=0.99,
        backend=by.name,
        interpret=by.interpret,
    )
    want = _exact(x) * (1.04 * float(gamma) / before)
    # What is emitted is rounded to the dtype of the gradients.
    tolerance = TOLERANCE + float(jnp.finfo(x.dtype).eps)
    return _entry("fused_clip", by, _named(x), _apart(got, want), tolerance)


def _many(arrays: list[jax.Array], by: kernels.Backend) -> dict[str, Any]:
    got = kernels.sums_of_squares(arrays, backend=by)
    want = [np.sum(_exact(x) ** 2) for x in arrays]
    of = [_named(x) for x in arrays]
    return _entry("sums_of_squares", by, of, _apart(got, want), TOLERANCE)


def _step(arrays: list[jax.Array], by: kernels.Backend) -> dict[str, Any]:
    """Two updates of AdaGC and AdamW together against the chain of both in XLA."""
    params = [jnp.ones(x.shape, jnp.float32) for x in arrays]
    clip: dict[str, Any] = {"phase": "steady", "groups": adagc_jax.per_tensor()}
    fused = kernels.adagc_adamw(1e-2, backend=by, **clip)
    chain = optax.chain(adagc_jax.adagc(**clip), optax.adamw(1e-2))
    outs = [_two_updates(optimizer, arrays, params) for optimizer in (fused, chain)]
    error = max(_apart(a, b) for a, b in zip(*outs, strict=True))
    of = [_named(x) for x in arrays]
    return _entry("adagc_adamw against the chain", by, of, error, 1e-5)


def _two_updates(optimizer: Any, grads: Any, params: Any) -> Any:
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    _, state = update(grads, state, params)
    spike = [10 * g for g in grads]
    return update(spike, state, params)[0]
