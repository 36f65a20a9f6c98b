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
import numpy as np
import optax
from _cli import BadOption
from jax.experimental import multihost_utils
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


def fake_devices(sizes: Mapping[str, int], processes: int = 1) -> None:
    """Asks for a process's part of the mesh as CPU devices; real devices go first.

    Raises:
      BadOption: If the processes cannot have parts of one size.
    """
    flag = "--xla_force_host_platform_device_count"
    flags, count = os.environ.get("XLA_FLAGS", ""), math.prod(sizes.values())
    if count % processes:
        raise BadOption(
            f"--mesh has {count} devices, which {processes} processes cannot share"
        )
    if count > processes and flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={count // processes}"


def processes_text(text: str) -> str:
    """`text`, if it is empty, auto, or HOST:PORT,PROCESSES,INDEX."""
    match = re.fullmatch(r"|auto|[^,]+:\d+,([1-9]\d*),(\d+)", text)
    if not match or (match[1] and int(match[2]) >= int(match[1])):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not auto, nor HOST:PORT,PROCESSES,INDEX with an index from 0 "
            "and below the number of processes"
        )
    return text


def join(config: Any) -> Any:
    """Joins the other processes; all but the first write to folders of their own."""
    if not config.distributed:
        fake_devices(parse_mesh(config.mesh))
        return config
    if config.distributed == "auto":
        jax.distributed.initialize()
    else:
        address, count, index = config.distributed.split(",")
        fake_devices(parse_mesh(config.mesh), int(count))
        jax.distributed.initialize(
            address,
            int(count),
            int(index),
            # Or the job of a cluster that this one runs in would be joined.
            cluster_detection_method="deactivate",
        )
    if index := jax.process_index():
        out = os.path.join(config.out, f"process-{index}")
        return dataclasses.replace(config, out=out)
    return config


def anywhere(asked: bool) -> bool:
    """Whether it was asked for in some process: all must do the same."""
    if jax.process_count() == 1:
        return asked
    return bool(multihost_utils.process_allgather(np.array(asked)).any())


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
    """A mesh over as many devices as it needs.

    Raises:
      BadOption: If there are fewer, or a process would be left out.
    """
    count, there = math.prod(sizes.values()), jax.device_count()
    if there < count or (jax.process_count() > 1 and there > count):
        raise BadOption(
            f"--mesh needs {count} devices, and {jax.default_backend()} has {there}; "
            "JAX_PLATFORMS=cpu makes fake ones"
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
      BadOption: If a dimension does not divide by the axis that splits it.
    """

    def place(path: Any, x: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        split = next((spec for found, spec in _SPECS if re.search(found, name)), ())
        spec = (None,) * (len(x.shape) - len(split)) + split
        for size, axis in zip(x.shape, spec, strict=True):
            if axis and size % mesh.shape[axis]:
                raise BadOption(
                    f"--mesh {axis}={mesh.shape[axis]} does not divide a dimension of "
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
