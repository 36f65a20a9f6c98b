"""Meshes from `fsdp=4,tensor=2`, and which axis splits which dimension of a model.

Without accelerators the devices are fake ones on the CPU. They must be asked for
before jax looks for devices, so `fake_devices` comes first.
"""

import argparse
import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

AXES = ("data", "fsdp", "tensor", "expert")

# The last dimensions of the tensors whose path matches; a stacked axis comes before.
_SPECS = (
    (r"attn/[qkv]/kernel$|mlp/(gate|up)/kernel$|unembed/kernel$", ("fsdp", "tensor")),
    (r"attn/out/kernel$|mlp/down/kernel$|embed/embedding$", ("tensor", "fsdp")),
    (r"mlp/(gate|up)$", ("expert", "fsdp", "tensor")),
    (r"mlp/down$", ("expert", "tensor", "fsdp")),
)


def parse_mesh(text: str) -> dict[str, int]:
    """``fsdp=2,tensor=2`` as sizes of all axes, 1 for those that are not named."""
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    for part in filter(None, text.split(",")):
        name, _, size = part.partition("=")
        if name not in AXES or not size.isdigit() or int(size) < 1:
            raise argparse.ArgumentTypeError(
                f"{part!r} is not AXIS=SIZE with an axis of {', '.join(AXES)}"
            )
        sizes[name] = int(size)
    return sizes


def mesh_text(text: str) -> str:
    """`text`, if it can be parsed."""
    parse_mesh(text)
    return text


def fake_devices(sizes: Mapping[str, int]) -> None:
    """Asks for as many CPU devices as the mesh needs; real devices go first."""
    flag = "--xla_force_host_platform_device_count"
    flags, count = os.environ.get("XLA_FLAGS", ""), math.prod(sizes.values())
    if count > 1 and flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={count}"


def join(config: Any) -> Any:
    """Joins the other processes; all but the first write to folders of their own.

    Raises:
      ValueError: If processes would have to write one checkpoint together.
    """
    if not config.distributed:
        return config
    if config.checkpoint_every or config.resume:
        raise ValueError("distributed: checkpoints are of one process only")
    if config.distributed == "auto":
        jax.distributed.initialize()
    else:
        address, count, index = config.distributed.split(",")
        jax.distributed.initialize(address, int(count), int(index))
    if index := jax.process_index():
        out = os.path.join(config.out, f"process-{index}")
        return dataclasses.replace(config, out=out)
    return config


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
    """A mesh over as many devices as it needs."""
    count = math.prod(sizes.values())
    if jax.device_count() < count:
        raise SystemExit(
            f"--mesh needs {count} devices, {jax.default_backend()} has "
            f"{jax.device_count()}: JAX_PLATFORMS=cpu makes fake ones."
        )
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=jax.devices()[:count],
    )


def init_state(optimizer: Any, params: Any) -> Any:
    """Adam's moments sharded like the parameters; of the clipper nothing is said."""
    shapes = jax.eval_shape(optimizer.init, params)
    shardings = optax.tree.map_params(
        optimizer,
        lambda _, param: param.sharding,
        shapes,
        params,
        transform_non_params=lambda _: None,
    )
    return jax.jit(optimizer.init, out_shardings=shardings)(params)


def shardings(mesh: Mesh, shapes: Any) -> Any:
    """Where each parameter lives, by its path.

    Raises:
      ValueError: If a dimension does not divide by the axis that splits it.
    """

    def place(path: Any, x: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        split = next((spec for found, spec in _SPECS if re.search(found, name)), ())
        spec = (None,) * (len(x.shape) - len(split)) + split
        for size, axis in zip(x.shape, spec, strict=True):
            if axis and size % mesh.shape[axis]:
                raise ValueError(
                    f"mesh: {axis}={mesh.shape[axis]} does not divide a dimension of "
                    f"{size} of {name} {x.shape}"
                )
        return NamedSharding(mesh, P(*spec))

    return jax.tree_util.tree_map_with_path(place, shapes)


class Placement:
    """Where arrays go: sharded over a mesh, or as they are when there is none."""

    def __init__(self, mesh: Mesh | None):
        self.mesh = mesh

    def params(self, make: Callable[[], Any]) -> Any:
        """Parameters, each device making its own part."""
        if self.mesh is None:
            return make()
        placed = shardings(self.mesh, jax.eval_shape(make))
        return jax.jit(make, out_shardings=placed)()

    def state(self, optimizer: Any, params: Any) -> Any:
        """The optimizer state of these parameters."""
        if self.mesh is None:
            return optimizer.init(params)
        return init_state(optimizer, params)

    def batch(self, batch: Any) -> Any:
        """A batch that every process has as a whole, by rows."""
        if self.mesh is None:
            return batch
        rows = NamedSharding(self.mesh, P(("data", "fsdp")))
        return jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, rows, x.__getitem__), batch
        )

    def outputs(self, *trees: Any) -> Any:
        """What a step's outputs must look like to be the inputs of the next one."""
        return None if self.mesh is None else jax.tree.map(lambda x: x.sharding, trees)
