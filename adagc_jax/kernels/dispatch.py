"""Which backend serves an array, and the call of it.

    api -> sums, clip -> _choose -> xla | pallas_tpu | triton_gpu
    routes, multi: the same choice for many arrays

``backend="auto"`` is XLA everywhere: no kernel has been measured to win on a device.
"""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from adagc_jax.checks import check_choice
from adagc_jax.kernels import tiling, xla
from adagc_jax.kernels.backend import BACKENDS
from adagc_jax.kernels.one_device import on_one_device
from adagc_jax.kernels.placement import (
    check_one_device,
    device_kind,
    is_elsewhere,
    platform_of,
)
from adagc_jax.kernels.transformable import with_rules_of
from adagc_jax.kernels.varying import alike

_PLATFORMS = {"pallas_tpu": "tpu", "pallas_gpu": "gpu"}
_REFUSALS = {"pallas_tpu": tiling.tpu_refusal, "pallas_gpu": tiling.gpu_refusal}


def why_not(x: Any, *, keep: Sequence[int] = (), backend: str) -> str:
    """Why a kernel cannot serve an array; empty if it can.

    Args:
      x: An array, or anything with a shape and a dtype.
      keep: As in `sum_squares`.
      backend: ``"pallas_tpu"`` or ``"pallas_gpu"``.

    Returns:
      The reason in words. Where the array lives is not looked at.

    Raises:
      ValueError: for a bad argument.

    Example:
      >>> import jax.numpy as jnp
      >>> from adagc_jax import kernels
      >>> print(kernels.why_not(jnp.ones((8, 8), jnp.float16), backend="pallas_tpu"))
      its TPU kernels read float32 and bfloat16, not float16
    """
    check_choice("backend", backend, tuple(_REFUSALS))
    shape, dtype = tuple(x.shape), jnp.dtype(x.dtype).name
    return refusal(backend, shape, kept_axes(x, keep), dtype)


def refusal(
    kernel: str, shape: tuple[int, ...], keep: tuple[int, ...], dtype: str
) -> str:
    """Why a kernel cannot serve an array of this shape; empty if it can."""
    return _REFUSALS[kernel](shape, keep, dtype)


def kept_axes(x: Any, keep: Sequence[int]) -> tuple[int, ...]:
    """The kept axes counted from the front, in order."""
    ndim = len(x.shape)
    if isinstance(keep, int):
        raise ValueError(f"keep must be a sequence of axes, got {keep}: say ({keep},).")
    axes = [operator.index(axis) for axis in keep]
    from_front = sorted(axis + ndim if axis < 0 else axis for axis in axes)
    if any(not 0 <= axis < ndim for axis in from_front) or (
        len(set(from_front)) < len(from_front)
    ):
        raise ValueError(
            f"keep must name different axes of an array of shape {tuple(x.shape)}, "
            f"got {tuple(keep)}."
        )
    return tuple(from_front)


def sums(
    x: jax.Array,
    scale: jax.Array | None,
    keep: tuple[int, ...],
    backend: str,
    interpret: Any,
) -> jax.Array:
    """Sums of ``(scale * x)**2`` over all axes but ``keep``."""
    chosen = _choose(x, keep, backend, interpret)
    operands = [x] if scale is None else [x, scale]

    def reference(x: jax.Array, scale: jax.Array | None = None) -> jax.Array:
        return xla.sums(x, keep, scale)

    def kernel(x: jax.Array, scale: jax.Array | None = None) -> jax.Array:
        kept = x.shape[: len(keep)]
        scales = None if scale is None else scale.reshape(-1)
        return slice_sums(chosen, x, keep, scales, interpret).reshape(kept)

    if chosen == "xla":
        return reference(*operands)
    return with_rules_of(reference, on_one_device(kernel))(*alike(*operands))


def clip(
    x: jax.Array,
    gamma: jax.Array,
    hypers: xla.Hypers,
    keep: tuple[int, ...],
    backend: str,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """``x`` clipped by the steady rule, and its sums of squares."""
    chosen = _choose(x, keep, backend, interpret)
    kind = device_kind(x) if chosen == "pallas_tpu" else ""

    def reference(x: jax.Array, gamma: jax.Array, *hypers: jax.Array) -> Any:
        return xla.clip(x, gamma, xla.Hypers(*hypers), keep)

    def kernel(x: jax.Array, gamma: jax.Array, *hypers: jax.Array) -> Any:
        values = xla.Hypers(*hypers)
        if chosen == "pallas_gpu":
            sums = slice_sums(chosen, x, keep, None, interpret).reshape(gamma.shape)
            factor = xla.steady_scale(sums, gamma, values)
            return xla.scale(x, factor, keep), sums
        from adagc_jax.kernels import pallas_tpu

        view = tiling.tpu_view(x.shape, keep, x.dtype.name)
        clipped, sums = pallas_tpu.clip(
            x, gamma.reshape(-1), values, view, kind, interpret
        )
        return clipped, sums.reshape(gamma.shape)

    if chosen == "xla":
        return reference(x, gamma, *hypers)
    served = with_rules_of(reference, on_one_device(kernel))
    return served(*alike(x, gamma, *hypers))


def slice_sums(
    chosen: str,
    x: jax.Array,
    keep: tuple[int, ...],
    scale: jax.Array | None,
    interpret: Any,
) -> jax.Array:
    """Sums of squares of the slices by a kernel, f32[slices]."""
    # Pallas takes a while to load, and the clippers do without it.
    if chosen == "pallas_gpu":
        from adagc_jax.kernels import triton_gpu

        slices = tiling.slices(x.shape, keep)
        return triton_gpu.sums(x, slices, scale, interpret)
    from adagc_jax.kernels import pallas_tpu

    return pallas_tpu.sums(
        x, tiling.tpu_view(x.shape, keep, x.dtype.name), scale, interpret
    )


def _choose(x: jax.Array, keep: tuple[int, ...], backend: str, interpret: Any) -> str:
    """The backend that serves the array."""
    check_choice("backend", backend, BACKENDS)
    if backend in ("auto", "xla"):
        return "xla"
    chosen = kernel_named(x, backend, interpret)
    if reason := why_not(x, keep=keep, backend=chosen):
        raise ValueError(
            f"backend={backend!r} cannot serve {x.dtype}{list(x.shape)} with "
            f'keep={keep}: {reason}. Use backend="xla", or "auto".'
        )
    check_one_device(x, backend)
    return chosen


def kernel_named(x: jax.Array, backend: str, interpret: Any) -> str:
    """``"pallas_tpu"`` or ``"pallas_gpu"``, if the array's platform has it.

    Raises:
      ValueError: if it is known to have another one.
    """
    chosen = _of_platform(x) if backend == "pallas" else backend
    if not interpret and is_elsewhere(x, _PLATFORMS[chosen]):
        raise ValueError(
            f"backend={backend!r} runs on {_PLATFORMS[chosen]}, and the array is on "
            f'{platform_of(x)}. Use backend="xla", or interpret=True for a test.'
        )
    return chosen


def _of_platform(x: jax.Array) -> str:
    platform = platform_of(x)
    for name, own in _PLATFORMS.items():
        if own == platform:
            return name
    raise ValueError(
        f'backend="pallas": there is no kernel for {platform}. Use backend="xla", or '
        '"pallas_tpu" or "pallas_gpu" with interpret=True for a test.'
    )
