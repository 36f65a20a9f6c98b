"""Where an array lives: its platform, its kind of device, and on how many.

The compiler cannot partition a kernel. Given an array on several devices it gathers
all of it on each, silently on GPU, so a kernel takes one device's array or, inside
``shard_map``, one shard. Under ``jit`` with axes of type Auto, types show the mesh at
most and not how an array is sharded over it, and without a mesh nothing: then it counts
how many devices there are to be seen, and `one_device` looks again when all is known.
"""

import math
from typing import Any

import jax
import jax.core
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from adagc_jax.manual import manual_axes


def check_one_device(x: jax.Array, backend: str) -> None:
    """Refuses an array of which type, sharding or mesh show several devices.

    Raises:
      ValueError: saying how many there are, and what to do.
    """
    count = _device_count(x)
    if count > 1:
        raise ValueError(
            f"backend={backend!r} was asked for an array on a mesh of {count} devices, "
            "which a kernel would gather whole on each of them. Call it inside "
            'jax.shard_map over all mesh axes, on the shards, or use backend="xla".'
        )


def sharding_for_kernel(
    x: jax.Array, said: Sharding | None
) -> tuple[NamedSharding | None, str]:
    """The sharding that a kernel is to be mapped over, and why it cannot be.

    Args:
      x: An array, or a shard inside ``shard_map``.
      said: How it is sharded, as the caller says; where the array or its type shows
        it, that counts.

    Returns:
      A sharding over several devices, or None for an array or shard of one; and the
      reason in words if XLA must sum it.
    """
    if manual_axes():
        count = _left_to_compiler(jax.sharding.get_abstract_mesh())
        why = f"{count} devices lie along mesh axes that are not manual"
        return None, why if count > 1 else ""
    known = _known_sharding(x) or said
    if known is None:
        return None, _why_unknown(x)
    if known.num_devices == 1:
        return None, _why_contradicted(x)
    if not isinstance(known, NamedSharding):
        return None, f"its sharding is no NamedSharding: {known}"
    return (None, why) if (why := _why_not_mapped(known, x)) else (known, "")


def platform_of(x: jax.Array) -> str:
    """``"tpu"``, ``"gpu"`` or ``"cpu"``; the default one for a traced array."""
    if _is_concrete(x):
        return next(iter(x.devices())).platform
    described = _described_device()
    return _platform(described) if described else jax.default_backend()


def device_kind(x: jax.Array) -> str:
    """The kind of device, such as ``"TPU v5 lite"``; empty where none is a TPU."""
    if _is_concrete(x):
        device = next(iter(x.devices()))
    else:
        device = _described_device() or jax.devices()[0]
    return device.device_kind if _platform(device) == "tpu" else ""


def is_elsewhere(x: jax.Array, platform: str) -> bool:
    """Whether an array is known to live on another platform."""
    return _is_concrete(x) and platform_of(x) != platform


def _device_count(x: jax.Array) -> int:
    if _is_concrete(x) and len(x.sharding.device_set) > 1:
        return len(x.sharding.device_set)
    meshes = (jax.sharding.get_abstract_mesh(), jax.typeof(x).sharding.mesh)
    return max(_left_to_compiler(mesh) for mesh in meshes)


def _left_to_compiler(mesh: Any) -> int:
    """Devices along the axes of a mesh that are not manual."""
    sizes = zip(mesh.axis_names, mesh.axis_sizes, strict=True)
    return math.prod(size for name, size in sizes if name not in mesh.manual_axes)


def _known_sharding(x: jax.Array) -> Sharding | None:
    """What the array itself or its type shows."""
    if _is_concrete(x):
        return x.sharding
    sharding = jax.typeof(x).sharding
    kinds = sharding.mesh.axis_types or ()
    # An axis of another type may split the array without its type showing it.
    shown = kinds and all(
        kind == AxisType.Explicit or size == 1
        for kind, size in zip(kinds, sharding.mesh.axis_sizes, strict=True)
    )
    return sharding if shown else None


def _why_contradicted(x: jax.Array) -> str:
    count = 1 if _is_concrete(x) else _left_to_compiler(jax.typeof(x).sharding.mesh)
    if count == 1:
        return ""
    return f"it is said to be on one device, and its type has a mesh of {count}"


def _why_unknown(x: jax.Array) -> str:
    meshes = (jax.sharding.get_abstract_mesh(), jax.typeof(x).sharding.mesh)
    counts = [_left_to_compiler(mesh) for mesh in meshes if not mesh.empty]
    described = 1 if _described_device() else jax.device_count()
    count = max(counts, default=described)
    if count == 1:
        return ""
    return (
        f"how it is sharded over {count} devices is not known: pass "
        "kernels.Backend(..., shardings=...)"
    )


def _why_not_mapped(sharding: NamedSharding, x: jax.Array) -> str:
    if PartitionSpec.UNCONSTRAINED in sharding.spec:
        return f"its sharding {sharding.spec} leaves an axis unconstrained"
    try:
        sharding.shard_shape(x.shape)
    except ValueError as error:
        return f"it does not divide into shards: {error}"
    return ""


def _described_device() -> Any:
    """The device of a program that is compiled for a description of one."""
    return getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)


def _platform(device: Any) -> str:
    # Descriptions of devices have their platform since jax 0.9.
    by_name = "tpu" if "TPU" in device.device_kind else jax.default_backend()
    return getattr(device, "platform", by_name)


def _is_concrete(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
