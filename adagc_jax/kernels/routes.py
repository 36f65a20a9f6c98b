"""Which leaf of a tree goes to a kernel, and which to XLA, and why.

leaves, kept axes, Backend -> routes -> multi (calls the kernels)
                                |
                                +--> whoever watches, such as `explain`
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.sharding import NamedSharding

from adagc_jax.kernels import tiling
from adagc_jax.kernels.backend import Backend
from adagc_jax.kernels.dispatch import kernel_named, refusal
from adagc_jax.kernels.placement import sharding_for_kernel


class Asked(NamedTuple):
    """One leaf of which sums of squares are wanted.

    Attributes:
      path: Such as ``layers/attn/q``.
      value: The array, or the shard of it that ``shard_map`` shows.
      keep: Axes that are not summed over.
      is_grid: Whether it is seen as a grid of shards (see `per_shard`).
    """

    path: str
    value: Any
    keep: tuple[int, ...]
    is_grid: bool = False


class Route(NamedTuple):
    """Where one leaf goes.

    Attributes:
      path: Of the leaf.
      shape: Of the array, or of the shard of it that ``shard_map`` shows.
      dtype: Its name.
      backend: ``"xla"``, ``"pallas_tpu"`` or ``"pallas_gpu"``.
      why: The reason in words.
      sharding: What a kernel must be mapped over; None for an array of one device.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    backend: str
    why: str
    sharding: NamedSharding | None = None


_watchers: contextvars.ContextVar[list[Route] | None] = contextvars.ContextVar(
    "watchers", default=None
)


@contextlib.contextmanager
def watch() -> Iterator[list[Route]]:
    """Collects the routes of all leaves that are asked for inside the ``with``.

    Meanwhile it is no error if no leaf can be served.
    """
    seen: list[Route] = []
    token = _watchers.set(seen)
    try:
        yield seen
    finally:
        _watchers.reset(token)


def routes(asked: Sequence[Asked], backend: Backend) -> list[Route]:
    """A route for every leaf.

    Raises:
      ValueError: if a kernel is named and no leaf can be served, or the platform is
        another one.
    """
    return noted([route_of(leaf, backend) for leaf in asked], backend)


def noted(found: list[Route], backend: Backend) -> list[Route]:
    """The routes, shown to whoever watches.

    Raises:
      ValueError: if a kernel is named, no leaf can be served and nobody watches.
    """
    seen = _watchers.get()
    if seen is not None:
        seen += found
    elif found and not backend.by_xla and all(r.backend == "xla" for r in found):
        reasons = dict.fromkeys(f"{r.path!r}: {r.why}" for r in found)
        shown = "; ".join(list(reasons)[:3]) + ("; ..." if len(reasons) > 3 else "")
        raise ValueError(
            f"backend={backend.name!r} can serve none of the {len(found)} leaves "
            f'({shown}). Use backend="auto", or see adagc_jax.explain.'
        )
    return found


def route_of(leaf: Asked, backend: Backend) -> Route:
    """Where one leaf goes for its sums of squares."""
    x = leaf.value
    names = leaf.path, tuple(x.shape), x.dtype.name
    if backend.by_xla:
        why = "asked for" if backend.name == "xla" else "no kernel is known to win"
        return Route(*names, "xla", why)
    kernel = kernel_named(x, backend.name, backend.interpret)
    if leaf.is_grid:
        return Route(*names, "xla", "its shards are groups, which XLA sums apart")
    if why := _why_few(x.shape):
        return Route(*names, "xla", why)
    sharding, why = sharding_for_kernel(x, backend.sharding_of(leaf.path))
    if why:
        return Route(*names, "xla", why)
    shape = names[1] if sharding is None else sharding.shard_shape(x.shape)
    why = _why_few(shape) or refusal(kernel, shape, leaf.keep, x.dtype.name)
    if why:
        return Route(*names, "xla", why)
    what = "whole" if sharding is None else f"shards {shape} of {sharding.spec}"
    return Route(*names, kernel, what, sharding)


def _why_few(shape: tuple[int, ...]) -> str:
    count = math.prod(shape)
    few = f"{count} elements are few, below {tiling.SMALLEST}"
    return few if count < tiling.SMALLEST else ""
