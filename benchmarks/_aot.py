"""Compiles steps for TPU pods and GPUs that are not there, and reads the programs.

    Case -> run (a subprocess with the right environment) -> measure -> a row of numbers

XLA compiles for a described topology on any machine: nothing runs, and every number is
the compiler's. In a subprocess, because a topology that the compiler does not know ends
the process, and because environment variables configure it.
"""

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _collectives import collectives
from _hlo import cycles, operations, parse, traffic
from _programs import group_count, local_parameters, optimizer_step, train_step
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh
from models import MODELS

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    # libtpu would ask a metadata server, and let one process in at a time.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
COMPILERS = {
    "tpu": ("libtpu", 'pip install "adagc-jax[tpu]"'),
    "cuda": (
        "jax_cuda12_plugin",
        "pip install jax-cuda12-plugin jax-cuda12-pjrt, in the version of jax",
    ),
}
# What a process without a GPU must be told about one: XLA's own numbers for an H100.
H100 = Path(__file__).parent / "h100_target.textproto"
RESULT = "RESULT "


@dataclasses.dataclass(frozen=True)
class Target:
    """The first ``chips`` of a topology, under XLA's name for it.

    For CUDA the name is slices x hosts x GPUs per host. A v7x chip is two devices, and
    its number that of devices.
    """

    platform: str
    topology: str
    chips: int


TARGETS = {
    "v5p-1": Target("tpu", "v5p:2x2x1", 1),
    "v5p-4": Target("tpu", "v5p:2x2x1", 4),
    "v5p-64": Target("tpu", "v5p:4x4x4", 64),
    "v5p-512": Target("tpu", "v5p:8x8x8", 512),
    "v5e-256": Target("tpu", "v5e:16x16", 256),
    "v6e-256": Target("tpu", "v6e:16x16", 256),
    "v7x-128": Target("tpu", "tpu7x:4x4x4", 128),
    "H100-1": Target("cuda", "1x1x1", 1),
    "H100-64": Target("cuda", "1x8x8", 64),
}
STEPS = {"optimizer": optimizer_step, "train": train_step}


@dataclasses.dataclass(frozen=True)
class Case:
    """One program to compile.

    Attributes:
      target: Key of `TARGETS`; the number is that of chips.
      model: Key of `models.MODELS`.
      layers: ``"unrolled"`` or ``"stacked"``.
      sharding: Key of `_programs.SHARDINGS`.
      mesh: ``(axis, size)`` pairs.
      clipper: Key of `_programs.CLIPPERS`; what stands before AdamW.
      dtype: Of the gradients; in a training step of parameters and moments too.
      step: Key of `STEPS`.
      axis_types: ``"Auto"`` or ``"Explicit"`` mesh axes.
    """

    target: str
    model: str
    layers: str
    sharding: str
    mesh: tuple[tuple[str, int], ...]
    clipper: str
    dtype: str = "float32"
    step: str = "optimizer"
    axis_types: str = "Auto"


def why_unavailable(target: str) -> str | None:
    """Why this Python cannot compile for a target; None if it can."""
    platform = TARGETS[target].platform
    module, install = COMPILERS[platform]
    if importlib.util.find_spec(module):
        return None
    return f"{target} needs the {platform} compiler: {install}"


def run(cases: Sequence[Case], seconds: int = 1800) -> Iterator[dict[str, Any]]:
    """Measures the cases in one subprocess, each row as soon as it is there.

    Raises:
      RuntimeError: if the process fails or takes too long, with the end of its output.
    """
    request = json.dumps([dataclasses.asdict(case) for case in cases])
    done, other = 0, []
    with subprocess.Popen(
        [sys.executable, __file__, request, str(seconds)],
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith(RESULT):
                    done += 1
                    yield json.loads(line.removeprefix(RESULT))
                else:
                    other.append(line)
            code = process.wait()
        finally:
            process.kill()
    if code != 0 or done < len(cases):
        said = "".join(other)[-4000:]
        raise RuntimeError(f"exit code {code} after {done} of {cases}:\n{said}")


def measure(case: Case) -> dict[str, Any]:
    """Compiles a case and reads the program.

    ``seconds`` are those of the processors: other work on the machine does not count.
    """
    model, stacked = MODELS[case.model], case.layers == "stacked"
    mesh = target_mesh(case)
    dtype = jnp.dtype(case.dtype)
    started = time.process_time()
    with jax.set_mesh(mesh):
        program = STEPS[case.step](
            case.clipper, model, stacked, case.sharding, dtype, mesh
        )
        traced = program.step.trace(*program.arguments)
        platform = TARGETS[case.target].platform
        compiled = traced.lower(lowering_platforms=(platform,)).compile()
    seconds = time.process_time() - started
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    module = parse(text)
    counted: dict[str, Any] = {}
    if case.step == "optimizer":
        counted["hbm_bytes"] = traffic(module)
        counted["collectives"] = collectives(module, dict(case.mesh))
        counted["cycles"] = cycles(module)
    return counted | {
        "seconds": round(seconds, 2),
        "operations": operations(module),
        "temp_bytes": memory.temp_size_in_bytes,
        "local_parameters": local_parameters(program.arguments[0]),
        "groups": group_count(model, stacked),
    }


def target_mesh(case: Case) -> Mesh:
    """The mesh of a case, over devices that exist as descriptions only."""
    target = TARGETS[case.target]
    extra: dict[str, Any] = {"topology_name": target.topology}
    if target.platform == "cuda":
        extra = {
            "topology_name": "h100",
            "target_config": H100.read_text(),
            "topology": target.topology,
        }
    topology = topologies.get_topology_desc(platform=target.platform, **extra)
    sizes = [size for _, size in case.mesh]
    return Mesh(
        np.array(topology.devices[: target.chips]).reshape(sizes),
        [axis for axis, _ in case.mesh],
        axis_types=(AxisType[case.axis_types],) * len(sizes),
    )


def main() -> None:
    """Measures the cases of the first argument within the seconds of the second."""
    signal.alarm(int(sys.argv[2]))  # ends the process even if the compiler hangs
    for fields in json.loads(sys.argv[1]):
        fields["mesh"] = tuple((axis, size) for axis, size in fields["mesh"])
        print(RESULT + json.dumps(measure(Case(**fields))), flush=True)


if __name__ == "__main__":
    main()
