"""The kernels' public functions: what they compute, and checks of arguments.

sum_squares, norm, fused_clip -> dispatch -> xla | pallas_tpu | triton_gpu
sums_of_squares -> routes, multi -> xla | multi_tpu | multi_gpu
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from adagc_jax.checks import check_hyper, check_precision, complement, evaluate
from adagc_jax.kernels import dispatch, xla
from adagc_jax.kernels.backend import Backend, as_backend
from adagc_jax.kernels.dispatch import kept_axes
from adagc_jax.kernels.multi import by_kernels
from adagc_jax.kernels.routes import Asked


def sum_squares(
    x: jax.Array,
    *,
    keep: Sequence[int] = (),
    backend: str = "auto",
    interpret: Any = False,
) -> jax.Array:
    r"""Sums of squares in float32, :math:`\sum_{i \notin keep} |x_i|^2`.

    ``grad``, ``jvp`` and ``vmap`` of a kernel are those of XLA's sum.

    Args:
      x: Array of any shape and any floating or complex dtype; kernels read float32 and
        bfloat16 (GPU: float16 too), and on TPU reduce two axes or more.
      keep: Axes that are not summed over, such as those of layers and experts. For a
        kernel they must be the leading ones.
      backend: ``"auto"``, which is XLA everywhere as long as no kernel has been
        measured to win on a device; ``"xla"``; ``"pallas_tpu"`` (Mosaic) or
        ``"pallas_gpu"`` (Triton); ``"pallas"``, the one of the platform. A sharded
        array must be passed to a kernel inside ``jax.shard_map``, shard by shard.
      interpret: Passed to ``pallas_call``: True runs a kernel on any platform, slowly,
        to test it; inside ``jax.shard_map`` with ``check_vma=False`` only.

    Returns:
      f32 of the kept axes' shape. The same bits in every run on the same device.

    Raises:
      ValueError: for a bad argument, or a named kernel that cannot serve the array.

    Example:
      >>> import jax.numpy as jnp
      >>> from adagc_jax import kernels
      >>> layers = jnp.array([[3.0, 4.0], [0.0, 2.0]])
      >>> kernels.sum_squares(layers, keep=(0,))
      Array([25.,  4.], dtype=float32)
    """
    x = jnp.asarray(x)
    return dispatch.sums(x, None, kept_axes(x, keep), backend, interpret)


def sums_of_squares(
    arrays: Sequence[jax.Array],
    *,
    keep: Sequence[Sequence[int]] | None = None,
    backend: str | Backend = "auto",
) -> list[jax.Array]:
    r"""Sums of squares of many arrays, in as few launches of a kernel as there can be.

    A launch sums neighbours of 64 MiB together, or one larger array: up to 64 arrays,
    and on TPU 4096 slices, in one launch, on GPU in two. An array that a kernel cannot
    serve, or of fewer than 16,384 elements, is summed by XLA; `explain` says which.

    Args:
      arrays: As in `sum_squares`. Sharded ones are summed shard by shard where types or
        the backend say how they are sharded, and by XLA where not.
      keep: For every array the axes that are not summed over; None for none.
      backend: As in `sum_squares`, or a `Backend`, whose shardings are a list like
        ``arrays``.

    Returns:
      For every array f32 of its kept axes' shape. The same bits in every run on the
      same device.

    Raises:
      ValueError: for a bad argument, or a named kernel that can serve no array.

    Example:
      >>> import jax.numpy as jnp
      >>> from adagc_jax import kernels
      >>> layers, head = jnp.array([[3.0, 4.0], [0.0, 2.0]]), jnp.array([1.0, 1.0])
      >>> kernels.sums_of_squares([layers, head], keep=[(0,), ()])
      [Array([25.,  4.], dtype=float32), Array(2., dtype=float32)]
    """
    keeps = [()] * len(arrays) if keep is None else keep
    if len(keeps) != len(arrays):
        raise ValueError(
            f"keep must name axes for each of the {len(arrays)} arrays, got "
            f"{len(keeps)} of them: use () for an array that is summed whole."
        )
    leaves = list(map(jnp.asarray, arrays))
    axes_of = list(map(kept_axes, leaves, keeps))
    asked = [Asked(str(i), x, axes_of[i]) for i, x in enumerate(leaves)]
    done = by_kernels(asked, as_backend(backend))
    return [
        done[i] if i in done else xla.sums(x, axes_of[i], None)
        for i, x in enumerate(leaves)
    ]


def norm(
    x: jax.Array,
    *,
    reference: Any = None,
    keep: Sequence[int] = (),
    backend: str = "auto",
    interpret: Any = False,
) -> jax.Array:
    r"""Norms in float32, in a range that a reference moves, in one read.

    With :math:`s` the power of two that brings the reference next to 1,
    :math:`\|x\|_2 = \sqrt{\sum |s x_i|^2} / s`. Products with a power of two are exact,
    so where the plain sum neither overflows nor underflows the result is the same.

    Args:
      x: As in `sum_squares`.
      reference: About the norm that is expected, such as AdaGC's ``gamma``: f32 of the
        kept axes' shape, or a number. Norms within a factor of 1e15 of it are right if
        it is a normal float32. Zero, denormal or not finite, or None: nothing is
        scaled. It has no derivative.
      keep: As in `sum_squares`.
      backend: As in `sum_squares`.
      interpret: As in `sum_squares`.

    Returns:
      f32 of the kept axes' shape.

    Raises:
      ValueError: as `sum_squares`, and for a reference of another shape.

    Example:
      >>> import jax.numpy as jnp
      >>> from adagc_jax import kernels
      >>> tiny = jnp.array([3e-30, 4e-30])
      >>> print(kernels.norm(tiny), kernels.norm(tiny, reference=1e-30))
      0.0 5e-30
    """
    x = jnp.asarray(x)
    axes = kept_axes(x, keep)
    if reference is None:
        return xla.root(dispatch.sums(x, None, axes, backend, interpret))
    shape = tuple(x.shape[axis] for axis in axes)
    check_precision("reference", reference)
    expected = jnp.asarray(reference).astype(jnp.float32)
    if expected.ndim == 0:
        expected = jnp.broadcast_to(expected, shape)
    _check_shape("reference", expected, shape)
    scale = xla.power_of_two(expected)
    return xla.root(dispatch.sums(x, scale, axes, backend, interpret)) / scale


def fused_clip(
    x: jax.Array,
    gamma: jax.Array,
    *,
    lambda_rel: float | jax.Array,
    beta: float | jax.Array,
    eps: float | jax.Array = 0.0,
    keep: Sequence[int] = (),
    backend: str = "auto",
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    r"""One step of AdaGC after warm-up, on one tensor or each slice of one.

    With :math:`n = \|x\|_2` and :math:`\ell = \lambda_{rel}\,\gamma`:

    .. math::
      x' = \min\{1, \ell / (n + \epsilon)\}\, x, \qquad
      \gamma' = \gamma + (1-\beta)\,(\min\{n, \ell\} - \gamma)

    as ``adagc(phase="steady")`` computes it for a tensor that has a reference: a zero
    norm hands ``x`` through and keeps ``gamma``, a norm that is not finite gives zeros
    and keeps ``gamma`` bit for bit. The TPU kernel reads ``x`` once where a slice fits
    into VMEM, and twice where not; on GPU a kernel sums and XLA scales.

    In front of an optimizer that XLA fuses, such as AdamW, this is not the way to clip:
    there XLA scales in passing and never writes the clipped gradient.

    Args:
      x: As in `sum_squares`.
      gamma: :math:`\gamma`, reference norms, f32 of the kept axes' shape.
      lambda_rel: :math:`\lambda_{rel}`, dimensionless number or f32[], traced or not.
      beta: :math:`\beta` in [0, 1), likewise.
      eps: :math:`\epsilon`, likewise, in units of the norm.
      keep: As in `sum_squares`; every kept slice is clipped by itself.
      backend: As in `sum_squares`.
      interpret: As in `sum_squares`.

    Returns:
      The clipped array in ``x``'s dtype, the norms before clipping and the new
      references, both f32 of the kept axes' shape.

    Raises:
      ValueError: for a bad argument, or a named kernel that cannot serve the array.

    Example:
      >>> import jax.numpy as jnp
      >>> from adagc_jax import kernels
      >>> clipped, norm, gamma = kernels.fused_clip(
      ...     jnp.array([6.0, 8.0]), jnp.float32(1.0), lambda_rel=2.0, beta=0.5
      ... )
      >>> print(clipped, norm, gamma)
      [1.2 1.6] 10.0 1.5

    Reference:
      AdaGC, https://arxiv.org/abs/2502.11034.
    """
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise ValueError(f"x must be floating or complex to be scaled, got {x.dtype}.")
    axes = kept_axes(x, keep)
    check_precision("gamma", gamma)
    gamma = jnp.asarray(gamma).astype(jnp.float32)
    _check_shape("gamma", gamma, tuple(x.shape[axis] for axis in axes))
    hypers = _hypers(lambda_rel, beta, eps)
    clipped, squares = dispatch.clip(x, gamma, hypers, axes, backend, interpret)
    before = xla.root(squares)
    return clipped, before, xla.steady_gamma(before, gamma, hypers)


def _hypers(lambda_rel: Any, beta: Any, eps: Any) -> xla.Hypers:
    for name, value in {"lambda_rel": lambda_rel, "beta": beta, "eps": eps}.items():
        if callable(value):
            raise ValueError(
                f"{name} must be a number or f32[], got {value!r}: fused_clip counts "
                "no steps, so evaluate a schedule first."
            )
        if getattr(value, "shape", ()):
            raise ValueError(
                f"{name} must be one number or f32[], got an array of shape "
                f"{value.shape}: only gamma differs from slice to slice."
            )
    check_hyper("lambda_rel", lambda_rel, open_low=True, open_high=True)
    check_hyper("beta", beta, high=1.0, open_high=True)
    check_hyper("eps", eps, open_high=True)
    step = jnp.zeros((), jnp.int32)
    return xla.Hypers(
        lambda_rel=evaluate(lambda_rel, step),
        weight=complement(beta, step),
        eps=evaluate(eps, step),
    )


def _check_shape(name: str, value: jax.Array, shape: tuple[int, ...]) -> None:
    if value.shape != shape:
        raise ValueError(
            f"{name} must have the shape of the kept axes, {shape}, got {value.shape}."
        )
