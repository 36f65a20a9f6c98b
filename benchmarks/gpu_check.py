"""Everything that only an accelerator can tell, in one run of less than six minutes.

    python benchmarks/gpu_check.py             on a machine with a GPU (or a TPU)
    python benchmarks/gpu_check.py --tiny      on a CPU: kernels interpreted, toy sizes

First whether every kernel is right, against float64; then how fast they read memory,
beside a plain copy; then whole optimizer steps, interleaved, by backend, tree, dtype
and size. No new measurement begins once `--seconds` are over, and the result names
what was left out. It is written after every part to `results/gpu.json`, with device,
driver, versions and date, and `auto` in `adagc_jax.kernels` is set by it.
"""

import argparse
import datetime
import functools
import json
import platform
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _gpu_correctness import checks
from _gpu_steps import cases, new_contestants
from models import MODELS, Llama, gradients, parameter_count
from step_time import interleaved

from adagc_jax import kernels

RESULTS = Path(__file__).parent / "results" / "gpu.json"
GIB = 1 << 30
TINY = Llama(layers=1, width=128, hidden=128, vocab=128)


def backends(platform_name: str) -> list[kernels.Backend]:
    """The kernels of a platform; on a CPU all of them, interpreted."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    names = {"gpu": ["pallas_gpu"], "tpu": ["pallas_tpu"]}
    interpreted = platform_name not in names
    return [
        kernels.Backend(name, shardings=here, interpret=interpreted)
        for name in names.get(platform_name, ["pallas_gpu", "pallas_tpu"])
    ]


def seconds_of(function: Any, *args: Any, rounds: int = 10) -> float:
    """The fastest of several runs of a compiled function."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - started)
    return min(times)


def bandwidth(size: int, named: list[kernels.Backend]) -> dict[str, Any]:
    """Bytes read and written per second: a copy, and sums of squares by backend."""
    x = jnp.ones((size // 4 // 1024, 1024), jnp.float32)
    found = {"copy": 2 * size / seconds_of(jax.jit(lambda x: x + 1), x)}
    for backend in ("xla", *named):
        summed = functools.partial(kernels.sums_of_squares, backend=backend)
        name = backend if isinstance(backend, str) else backend.name
        found[f"sums_of_squares, {name}"] = size / seconds_of(jax.jit(summed), [x])
    return {
        "bytes": size,
        "gb_per_s": {name: round(rate / 1e9, 3) for name, rate in found.items()},
    }


def steps(
    tiny: bool, named: list[kernels.Backend], deadline: float
) -> Iterator[dict[str, Any]]:
    """Whole optimizer steps of growing size; those left out say why."""
    for case in cases(tiny):
        entry = {"model": case.model, "layers": case.layers, "gradients": case.dtype}
        if time.perf_counter() > deadline:
            yield {**entry, "left_out": "the time was over"}
            continue
        model = TINY if tiny else MODELS[case.model]
        grads = gradients(model, case.layers == "stacked", jnp.dtype(case.dtype))
        count = parameter_count(grads)
        # Parameters and two moments each, the gradients once.
        needed = count * (12 * case.contestants + 4)
        if (room := memory()) and needed > 0.9 * room:
            yield {**entry, "left_out": f"needs {needed / GIB:.0f} GiB"}
            continue
        contestants = new_contestants(case, grads, named)
        rows = interleaved(contestants, 2 if tiny else 10)
        yield {**entry, "parameters": count, "rows": rows}


def memory() -> int:
    """Bytes of the device; 0 if it does not say."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    device = jax.devices()[0]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, timeout=30)
        driver = asked.stdout.strip()
    except FileNotFoundError:
        driver = ""
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "driver": driver,
        "python": platform.python_version(),
        "versions": {"jax": jax.__version__, "optax": optax.__version__},
        "date": datetime.date.today().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="toy sizes, for a CPU")
    parser.add_argument("--seconds", type=float, default=330.0, help="for all of it")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    started = time.perf_counter()
    report: dict[str, Any] = machine()
    if report["platform"] == "cpu" and not args.tiny:
        parser.error("there is no accelerator here: --tiny runs it on a CPU")
    named = backends(report["platform"])

    def save() -> None:
        report["seconds"] = round(time.perf_counter() - started, 1)
        args.out.write_text(json.dumps(report, indent=1) + "\n")

    report["correctness"] = list(checks(named, args.tiny))
    save()
    for check in report["correctness"]:
        print(check, flush=True)
    report["bandwidth"] = bandwidth(GIB >> 10 if args.tiny else GIB, named)
    save()
    print(report["bandwidth"], flush=True)
    report["steps"] = []
    for step in steps(args.tiny, named, started + args.seconds):
        report["steps"].append(step)
        save()
        print(step, flush=True)
    wrong = [check for check in report["correctness"] if not check["right"]]
    if wrong:
        raise SystemExit(f"{len(wrong)} checks failed: {wrong}")


if __name__ == "__main__":
    main()
