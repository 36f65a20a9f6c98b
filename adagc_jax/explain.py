"""A table of which leaf's norm is taken by which kernel, before anything runs.

Outside the flow of data: it traces one update of the optimizer, without data, and shows
which routes the leaves of its clippers took.
"""

import contextlib
import dataclasses
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from adagc_jax.fixed import tensor_gc
from adagc_jax.kernels.backend import Backend
from adagc_jax.kernels.routes import Route, watch
from adagc_jax.tables import aligned


@dataclasses.dataclass(frozen=True)
class KernelTable:
    """What `explain` found; print it.

    Attributes:
      rows: One for every leaf that a clipper reads, in the tree's order: ``path``,
        ``shape``, ``dtype``, ``backend`` (``"xla"``, ``"pallas_tpu"`` or
        ``"pallas_gpu"``), ``why``, and the ``sharding`` that a kernel is mapped over.
    """

    rows: tuple[Route, ...]

    def __str__(self) -> str:
        """The table as text, with totals in the last line."""
        head = ("leaf", "shape", "dtype", "summed by", "why")
        cells = [(r.path, str(r.shape), r.dtype, r.backend, r.why) for r in self.rows]
        by_kernel = sum(row.backend != "xla" for row in self.rows)
        total = f"kernels: {by_kernel} of {len(self.rows)} leaves"
        return "\n".join([*aligned([head, *cells]), total])


def explain(
    optimizer: optax.GradientTransformation | Backend | str,
    params: Any,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    **extra_args: Any,
) -> KernelTable:
    """Which backend takes the norm of which leaf under ``jit``, and why.

    Args:
      optimizer: Any optax transformation, with clippers of this library at any depth;
        or what would be given to one as ``backend``.
      params: Parameters, or ``jax.ShapeDtypeStruct`` of them, with the shapes, dtypes
        and explicit shardings of the gradients.
      mesh: The mesh that the training step is traced under, as by ``jax.set_mesh``;
        None if there is none.
      **extra_args: Handed to ``update``, such as the ``loss`` that a guard asks for.

    Returns:
      A `KernelTable`: ``print`` it, or read its ``rows``.

    Raises:
      ValueError: for an optimizer without a clipper that takes norms, or a kernel that
        the platform does not have.

    Example:
      >>> import adagc_jax, jax, jax.numpy as jnp
      >>> params = {"b": jnp.ones(128), "w": jnp.ones((128, 128))}
      >>> here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
      >>> backend = adagc_jax.kernels.Backend("pallas_tpu", shardings=here)
      >>> print(adagc_jax.explain(adagc_jax.adagc(backend=backend), params))
      leaf  shape       dtype    summed by   why
      b     (128,)      float32  xla         128 elements are few, below 16384
      w     (128, 128)  float32  pallas_tpu  whole
      kernels: 1 of 2 leaves
    """
    named = isinstance(optimizer, str | Backend)
    traced = tensor_gc(backend=optimizer) if named else optimizer
    with _under(mesh), watch() as seen:
        state = jax.eval_shape(traced.init, params)
        jax.eval_shape(
            lambda grads, state, params: traced.update(
                grads, state, params, **extra_args
            ),
            params,
            state,
            params,
        )
    if not seen:
        raise ValueError(
            "optimizer reads no gradients for norms: give an optax transformation with "
            f"one of this library's clippers in it, got {optimizer!r}."
        )
    # A clipper of gradients and parameters asks twice.
    return KernelTable(tuple(dict.fromkeys(seen)))


def _under(mesh: Mesh | AbstractMesh | None) -> Any:
    if mesh is None:
        return contextlib.nullcontext()
    if isinstance(mesh, Mesh):
        return jax.set_mesh(mesh)
    return jax.sharding.use_abstract_mesh(mesh)
