"""Where an array lives: its platform, its kind of device, and on how many.

The compiler cannot partition a kernel. Given an array on several devices it gathers
all of it on each, silently on GPU, so a kernel takes one device's array or, inside
``shard_map``, one shard. Under ``jit`` with axes of type Auto and no mesh set, types do
not show that an array is sharded, and neither can this module.
"""

import math
from typing import Any

import jax
import jax.core


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


def _described_device() -> Any:
    """The device of a program that is compiled for a description of one."""
    return getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)


def _platform(device: Any) -> str:
    # Descriptions of devices have their platform since jax 0.9.
    by_name = "tpu" if "TPU" in device.device_kind else jax.default_backend()
    return getattr(device, "platform", by_name)


def _is_concrete(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
