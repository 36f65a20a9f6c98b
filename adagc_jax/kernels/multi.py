"""Sums of squares of many arrays by kernels, in few launches, sharded or not.

    leaves -> routes -> kernels, over shards where there are any -> sums by position

Arrays of one device go to a kernel as they are. Sharded ones go through ``shard_map``
over their known shardings: a kernel sums each shard, and one small all-reduce for all
arrays together adds up the axes that are summed over. No array is moved.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from adagc_jax.axis_names import words
from adagc_jax.kernels import xla
from adagc_jax.kernels.backend import Backend
from adagc_jax.kernels.dispatch import slice_sums
from adagc_jax.kernels.one_device import on_one_device
from adagc_jax.kernels.routes import Asked, Route, routes
from adagc_jax.kernels.transformable import with_rules_of
from adagc_jax.manual import summed_over, varying_axes

Sums = Callable[..., list[jax.Array]]


def by_kernels(asked: Sequence[Asked], backend: Backend) -> dict[int, jax.Array]:
    """The sums of the leaves that kernels serve, f32 of their kept axes, by position.

    Raises:
      ValueError: as `routes`.
    """
    found = routes(asked, backend)
    together: dict[Any, list[int]] = {}
    for position, route in enumerate(found):
        if route.backend != "xla":
            key = _meeting(route, asked[position].value)
            together.setdefault(key, []).append(position)
    sums: dict[int, jax.Array] = {}
    for positions in together.values():
        leaves = [asked[p] for p in positions]
        own = [found[p] for p in positions]
        results = _summed(leaves, own, backend.interpret)
        sums |= zip(positions, results, strict=True)
    return sums


def _meeting(route: Route, x: jax.Array) -> Any:
    """What arrays of one call have in common: a mesh, or what they vary over."""
    if route.sharding is not None:
        return route.backend, route.sharding.mesh
    return route.backend, varying_axes(x)


def _summed(
    leaves: Sequence[Asked], own: Sequence[Route], interpret: Any
) -> list[jax.Array]:
    keeps = [leaf.keep for leaf in leaves]

    def reference(*arrays: jax.Array) -> list[jax.Array]:
        return [xla.sums(x, keep, None) for x, keep in zip(arrays, keeps, strict=True)]

    def kernel(*arrays: jax.Array) -> list[jax.Array]:
        return _launched(own[0].backend, arrays, keeps, interpret)

    kernel = on_one_device(kernel)
    if own[0].sharding is not None:
        kernel = _over_shards(kernel, own, keeps)
    return with_rules_of(reference, kernel)(*(leaf.value for leaf in leaves))


def _over_shards(
    kernel: Sums, own: Sequence[Route], keeps: Sequence[tuple[int, ...]]
) -> Sums:
    """The same for whole arrays of the leaves' shardings."""
    sharding = own[0].sharding
    assert sharding is not None
    context = jax.sharding.get_abstract_mesh()
    mesh = sharding.mesh if context.empty else context
    entries = [_entries(route) for route in own]
    kept = [[e[axis] for axis in keep] for e, keep in zip(entries, keeps, strict=True)]
    rest = [
        {
            name
            for axis, e in enumerate(of_leaf)
            if axis not in keep
            for name in words(e)
        }
        for of_leaf, keep in zip(entries, keeps, strict=True)
    ]
    # In the order of the mesh: one sum for axes named in any order.
    summed = [
        tuple(name for name in mesh.axis_names if name in names) for names in rest
    ]

    def of_shards(*shards: jax.Array) -> list[jax.Array]:
        return summed_over(kernel(*shards), summed)

    return jax.shard_map(
        of_shards,
        mesh=mesh,
        in_specs=tuple(PartitionSpec(*of_leaf) for of_leaf in entries),
        out_specs=[PartitionSpec(*of_leaf) for of_leaf in kept],
        # Kernels want operands that vary alike, and these need not.
        check_vma=False,
    )


def _launched(
    kernel: str,
    arrays: Sequence[jax.Array],
    keeps: Sequence[tuple[int, ...]],
    interpret: Any,
) -> list[jax.Array]:
    """The sums of arrays, or shards, of one device."""
    launcher = _launcher(kernel)
    results: dict[int, jax.Array] = {}
    for positions in launcher.launches(arrays, keeps):
        group, own = [arrays[p] for p in positions], [keeps[p] for p in positions]
        if len(group) == 1:
            sums = [slice_sums(kernel, group[0], own[0], None, interpret)]
        else:
            sums = launcher.sums(group, own, interpret)
        for p, total in zip(positions, sums, strict=True):
            results[p] = total.reshape(arrays[p].shape[: len(keeps[p])])
    return [results[p] for p in range(len(arrays))]


def _launcher(kernel: str) -> Any:
    # Pallas takes a while to load, and the clippers do without it.
    if kernel == "pallas_gpu":
        from adagc_jax.kernels import multi_gpu

        return multi_gpu
    from adagc_jax.kernels import multi_tpu

    return multi_tpu


def _entries(route: Route) -> tuple[Any, ...]:
    assert route.sharding is not None
    spec = tuple(route.sharding.spec)
    return spec + (None,) * (len(route.shape) - len(spec))
