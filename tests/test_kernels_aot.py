"""The kernels ahead of time, for devices that are not there.

Interpreters say that a kernel is right; only the compilers of Mosaic and Triton say
that it is legal, and only the compiled program that it is called and nothing is copied
for it. Compiling happens in a process of its own (this file run as a program). Without
libtpu (or a CUDA plugin) the tests are skipped.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

aot = importlib.import_module("_aot")
hlo = importlib.import_module("_hlo")

TPUS = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "v7x": "tpu7x:2x2x1",
}
COLUMNS = 1024
# Of 2-D arrays of 4-byte numbers with so many columns, by generation in MiB.
LARGEST_RESIDENT = {"v4": 11, "v5e": 123, "v5p": 59, "v6e": 123, "v7x": 59}
RESULT = "RESULT "
MIB = 1 << 20

Row = dict[str, Any]


def tpu_shapes(generation: str, dtype: str) -> dict[str, tuple[int, ...]]:
    """Ragged, of 16 columns (kept transposed), stacked; the limit, and beyond it."""
    per_mib = 256 if dtype == "float32" else 512
    rows = LARGEST_RESIDENT[generation] * per_mib
    return {
        "sums": (1000, 2752),
        "norm": (3000, 16),
        "stacked": (4, 2048, 1000),
        "resident": (rows, COLUMNS),
        "two_phase": (rows + 16, COLUMNS),
    }


TPU_KERNELS = {
    "sums": ("adagc_sum_squares", 1),
    "norm": ("adagc_sum_squares", 1),
    "stacked": ("adagc_clip_resident", 2),
    "resident": ("adagc_clip_resident", 2),
    # That it reads its operand twice does not show outside of it.
    "two_phase": ("adagc_clip_two_phase", 2),
}
GPU_SHAPES = {"sums": (1000, 2752), "norm": (129,), "stacked": (4, 1000, 1001)}
GPU_PASSES = {"sums": 1, "norm": 1, "stacked": 3}
GPU_DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(scope="module")
def tpu() -> dict[str, Row]:
    return compiled("tpu", "v5p-1")


@pytest.fixture(scope="module")
def gpu() -> dict[str, Row]:
    return compiled("cuda", "H100-1")


def compiled(platform: str, target: str) -> dict[str, Row]:
    if reason := aot.why_unavailable(target):
        pytest.skip(reason)
    done = subprocess.run(
        [sys.executable, __file__, platform],
        env=os.environ | aot.ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = [x for x in done.stdout.splitlines() if x.startswith(RESULT)]
    return json.loads(results[0].removeprefix(RESULT))


@pytest.mark.parametrize("kernel", TPU_KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("generation", TPUS)
def test_tpu_kernel_is_called_and_nothing_copied(
    generation: str, dtype: str, kernel: str, tpu: dict[str, Row]
) -> None:
    row = tpu[f"{generation} {dtype} {kernel}"]
    name, passes = TPU_KERNELS[kernel]
    assert row["targets"] == ["tpu_custom_call"]
    assert row["kernels"] == [name]
    assert row["copies"] == []
    assert row["passes"] == pytest.approx(passes, abs=0.01)


def test_64_bit_types_switched_on_change_nothing(tpu: dict[str, Row]) -> None:
    assert tpu["x64"]["targets"] == ["tpu_custom_call"]


def test_a_copy_would_be_seen(tpu: dict[str, Row]) -> None:
    """Of an array that is refused because its view is no bitcast."""
    assert tpu["refused"]["copies"] == ["copy"]


@pytest.mark.parametrize("kernel", GPU_SHAPES)
@pytest.mark.parametrize("dtype", GPU_DTYPES)
def test_gpu_kernel_is_called_and_nothing_copied(
    dtype: str, kernel: str, gpu: dict[str, Row]
) -> None:
    row = gpu[f"{dtype} {kernel}"]
    assert row["targets"] == ["__gpu$xla.gpu.triton"]
    # XLA scales; nothing else writes an array.
    assert row["copies"] == (["fusion"] if kernel == "stacked" else [])
    assert row["passes"] == pytest.approx(GPU_PASSES[kernel], rel=0.15)


def check_shards(row: Row, calls: int) -> None:
    assert len(row["targets"]) == calls
    collectives = [op for op in row["ops"] if op.startswith(hlo.COLLECTIVES)]
    assert {op.removesuffix("-start") for op in collectives if "-done" not in op} == {
        "all-reduce"
    }


def test_shards_on_tpu_stay_where_they_are(tpu: dict[str, Row]) -> None:
    check_shards(tpu["shard_map"], calls=4)


def test_shards_on_gpu_stay_where_they_are(gpu: dict[str, Row]) -> None:
    # The sums alone and those for clipping are the same call; of two arrays it is two.
    check_shards(gpu["shard_map"], calls=4)


STEPS = {"v5e": (1, 4), "v5p": (1, 4)}  # generations, and on how many chips


def called(row: Row) -> list[str]:
    """Without the call that puts slices of a prefetched array together for free."""
    return [name for name in row["targets"] if name != "ConcatBitcast"]


def check_step(row: Row, calls: int, chips: int) -> None:
    """Kernels are called, and besides weights are read and written by AdamW alone."""
    assert row["launches"] == len(called(row)) == calls
    assert row["copies"] == ["fusion"] * 4
    ops = {op for op in row["ops"] if op.startswith(hlo.COLLECTIVES)}
    assert {op.split("-start")[0].split("-done")[0] for op in ops} <= {"all-reduce"}
    assert bool(ops) == (chips > 1)
    # AdamW moves 28 bytes per parameter; one more read is 32, or less where gradients
    # stay on the chip between the read and the update.
    assert 28.0 < row["bytes_per_parameter"] < 32.05


@pytest.mark.parametrize(
    ("generation", "chips"), [(g, n) for g, numbers in STEPS.items() for n in numbers]
)
def test_a_whole_step_on_tpu_with_norms_by_a_kernel(
    generation: str, chips: int, tpu: dict[str, Row]
) -> None:
    # Neighbours share a launch where they are shards of 64 MiB together.
    check_step(tpu[f"{generation} step on {chips}"], {1: 4, 4: 2}[chips], chips)


def test_a_whole_step_on_gpu_with_norms_by_a_kernel(gpu: dict[str, Row]) -> None:
    # Twice the sums of blocks, and the sums of these.
    check_step(gpu["step on 4"], calls=4, chips=4)


# Bytes per parameter by the dtype of gradients: 12 of them are the parameter once more,
# which `update` leaves to XLA. AdamW alone moves 28 and 26, the chain 32 and 28.
FUSED = {("float32", "step"): 28, ("bfloat16", "step"): 26, ("float32", "update"): 40}


@pytest.mark.parametrize(("dtype", "how"), FUSED)
@pytest.mark.parametrize("generation", ["v5e", "v5p"])
def test_adagc_and_adamw_in_one_kernel(
    generation: str, dtype: str, how: str, tpu: dict[str, Row]
) -> None:
    row = tpu[f"{generation} {dtype} {how}"]
    assert called(row) == ["tpu_custom_call"] * 2
    assert row["kernels"] == ["adagc_adamw"]
    assert len(row["copies"]) == (0 if how == "step" else 2)
    assert row["bytes_per_parameter"] == pytest.approx(FUSED[dtype, how], abs=0.02)


def main(platform: str) -> None:
    """Compiles every case of a platform and prints what the programs hold."""
    rows = tpu_rows() if platform == "tpu" else gpu_rows()
    print(RESULT + json.dumps(rows))


def tpu_rows() -> dict[str, Row]:
    import jax
    from jax.experimental import topologies

    from adagc_jax.kernels import pallas_tpu, tiling

    rows, devices = {}, []
    for generation, topology in TPUS.items():
        devices = topologies.get_topology_desc(
            platform="tpu", topology_name=topology
        ).devices
        for chips in STEPS.get(generation, ()):
            row = whole_step("pallas_tpu", devices[:chips])
            rows[f"{generation} step on {chips}"] = row
        if generation in STEPS:
            for dtype, how in FUSED:
                rows[f"{generation} {dtype} {how}"] = fused_step(how, dtype, devices[0])
        with described(devices[0]):
            for dtype in ("float32", "bfloat16"):
                for kernel, shape in tpu_shapes(generation, dtype).items():
                    function = functions(kernel, "pallas_tpu")
                    row = measure(function, shape, dtype, devices[0])
                    rows[f"{generation} {dtype} {kernel}"] = row
    view = tiling.View(slices=8, rows=512 * 16, cols=64, swapped=False)
    rows["refused"] = measure(
        lambda x, _: pallas_tpu.sums(x, view, None, False),
        (8, 512, 16, 64),
        "float32",
        devices[0],
    )
    with jax.enable_x64(True):
        two_phase = functions("two_phase", "pallas_tpu")
        rows["x64"] = measure(two_phase, (16384, 1024), "float32", devices[0])
    rows["shard_map"] = sharded("pallas_tpu", devices)
    return rows


def gpu_rows() -> dict[str, Row]:
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(
        platform="cuda",
        topology_name="h100",
        target_config=aot.H100.read_text(),
        topology="1x1x4",
    ).devices
    rows = {
        f"{dtype} {kernel}": measure(
            functions(kernel, "pallas_gpu"), shape, dtype, devices[0]
        )
        for dtype in GPU_DTYPES
        for kernel, shape in GPU_SHAPES.items()
    }
    rows["step on 4"] = whole_step("pallas_gpu", devices)
    return rows | {"shard_map": sharded("pallas_gpu", devices)}


def functions(kernel: str, backend: str) -> Any:
    from adagc_jax import kernels

    kw: dict[str, Any] = {"backend": backend}
    if kernel == "sums":
        return lambda x, _: kernels.sum_squares(x, **kw)
    if kernel == "norm":
        return lambda x, gamma: kernels.norm(x, reference=gamma, **kw)
    kw |= {"lambda_rel": 1.04, "beta": 0.99}
    kw |= {"keep": (0,)} if kernel == "stacked" else {}
    return lambda x, gamma: kernels.fused_clip(x, gamma, **kw)


def measure(function: Any, shape: tuple[int, ...], dtype: str, device: Any) -> Row:
    import jax
    from jax.sharding import SingleDeviceSharding

    one = SingleDeviceSharding(device)
    x = jax.ShapeDtypeStruct(shape, dtype, sharding=one)
    kept = shape[:1] if len(shape) == 3 else ()
    gamma = jax.ShapeDtypeStruct(kept, "float32", sharding=one)
    return read(function, (x, gamma), device, x.size * x.dtype.itemsize)


def sharded(backend: str, devices: Any) -> Row:
    """Layers over one axis and rows over another, with types that are checked."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    from adagc_jax import kernels

    mesh = Mesh(np.array(devices[:4]).reshape(2, 2), ("l", "r"))

    def one_shard(x: Any, gamma: Any) -> Any:
        kw: dict[str, Any] = {"keep": (0,), "backend": backend}
        squares = jax.lax.psum(kernels.sum_squares(x, **kw), "r")
        keep = [(0,), (0,)]
        both = kernels.sums_of_squares([x, x + 1.0], keep=keep, backend=backend)
        squares += sum(jax.lax.psum(both, "r"))
        norm = kernels.norm(x, reference=gamma, **kw)[:, None]
        return squares, norm, kernels.fused_clip(x, gamma, **kw, **hypers)[0]

    hypers: dict[str, Any] = {"lambda_rel": 1.04, "beta": 0.99}
    function = jax.shard_map(
        one_shard,
        mesh=mesh,
        in_specs=(P("l", "r"), P("l")),
        out_specs=(P("l"), P("l", "r"), P("l", "r")),
    )
    arguments = [
        jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec))
        for shape, spec in (((4, 2048, 512), P("l", "r")), ((4,), P("l")))
    ]
    return read(function, arguments, devices[0], 2 * 1024 * 512 * 4)


def whole_step(backend: str, devices: Any) -> Row:
    """Four weights and a norm through adagc and AdamW, split by rows over the devices.

    With automatic mesh axes: only the backend says how gradients are sharded.
    """
    import jax
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    import adagc_jax

    mesh = Mesh(np.array(devices), ("fsdp",))
    shapes = {"down": (11008, 4096), "q": (4096, 4096), "up": (4096, 11008)}
    shapes |= {"norm": (4096,), "o": (4096, 4096)}
    params = {
        name: jax.ShapeDtypeStruct(
            shape,
            "float32",
            sharding=NamedSharding(mesh, P("fsdp") if len(shape) > 1 else P()),
        )
        for name, shape in shapes.items()
    }
    said = {name: leaf.sharding for name, leaf in params.items()}
    clip = adagc_jax.adagc(
        phase="steady", backend=adagc_jax.kernels.Backend(backend, shardings=said)
    )
    optimizer = optax.chain(clip, optax.adamw(1e-3))

    def placed(path: Any, leaf: Any) -> Any:
        sharding = said.get(getattr(path[-1], "key", ""), NamedSharding(mesh, P()))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    state = jax.tree_util.tree_map_with_path(
        placed, jax.eval_shape(optimizer.init, params)
    )

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    count = sum(np.prod(leaf.shape) for leaf in params.values()) // len(devices)
    row = read(step, (params, state, params), devices[0], MIB, donate=(0, 1))
    traced = str(jax.make_jaxpr(step)(params, state, params))
    return row | {
        "launches": traced.count("pallas_call["),
        "bytes_per_parameter": row["passes"] * MIB / count,
    }


def fused_step(how: str, dtype: str, device: Any) -> Row:
    """A matrix and a stack through one kernel each, and a norm by XLA."""
    import jax
    import optax
    from jax.sharding import SingleDeviceSharding

    import adagc_jax
    from adagc_jax import kernels

    one = SingleDeviceSharding(device)
    shapes = {"stack": (16, 2048, 2056), "w": (5504, 2048), "norm": (4096,)}
    optimizer = kernels.adagc_adamw(
        1e-3,
        phase="steady",
        groups=adagc_jax.stacked({"^stack": 0}),
        backend=kernels.Backend("pallas_tpu", shardings=one),
    )

    def placed(tree: Any, dtype: Any = None) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=one),
            tree,
        )

    def step(params: Any, state: Any, grads: Any) -> Any:
        if how == "step":
            return optimizer.step(params, state, grads)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {n: jax.ShapeDtypeStruct(s, "float32") for n, s in shapes.items()}
    state = placed(jax.eval_shape(optimizer.init, params))
    arguments = placed(params), state, placed(params, dtype)
    with described(device):
        row = read(step, arguments, device, MIB, donate=(0, 1))
    count = sum(int(np.prod(s)) for s in shapes.values())
    return row | {"bytes_per_parameter": row["passes"] * MIB / count}


def described(device: Any) -> Any:
    """What tells a kernel for which device it is compiled."""
    import jax
    from jax.sharding import AbstractDevice, AbstractMesh

    kind = AbstractDevice(device_kind=device.device_kind, num_cores=1, platform="tpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind))


def read(
    function: Any, arguments: Any, device: Any, size: int, donate: tuple[int, ...] = ()
) -> Row:
    """Custom calls, copies of the array, and its passes through HBM."""
    import re

    import jax

    platform = "cuda" if device.platform == "gpu" else device.platform
    traced = jax.jit(function, donate_argnums=donate).trace(*arguments)
    text = traced.lower(lowering_platforms=(platform,)).compile().as_text()
    assert text is not None
    module = hlo.parse(text)
    entry = [i for i in module.computations[module.entry] if i.op not in hlo.FREE]
    copying = ("copy", "transpose", "reshape", "fusion")
    return {
        "targets": re.findall(r'custom_call_target="([^"]*)"', text),
        "kernels": [
            n for n in sorted({*dict(TPU_KERNELS.values()), "adagc_adamw"}) if n in text
        ],
        "ops": [i.op for i in entry],
        "copies": [
            i.op
            for i in entry
            if i.op in copying and sum(b.bytes for b in hlo.buffers(i.type)) >= size
        ],
        "passes": hlo.traffic(module) / size,
    }


if __name__ == "__main__":
    main(sys.argv[1])
