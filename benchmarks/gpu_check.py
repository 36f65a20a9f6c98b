"""Everything that only an accelerator can tell, in one run of less than six minutes.

    python benchmarks/gpu_check.py             on a machine with a GPU (or a TPU)
    python benchmarks/gpu_check.py --tiny      on a CPU: kernels interpreted, toy sizes

First whether every kernel is right, against float64 or XLA's chain; then how fast they
read memory, beside a plain copy; then whole optimizer steps, interleaved, by backend,
tree, dtype and size. What fails is reported and the rest goes on, with an exit status
of 1 at the end. No measurement begins that would end after `--seconds` if it took as
long as the longest of its kind so far, and the result names what was left out. It is
written after every measurement to `results/gpu.json`, with device, driver, versions and
date: what `auto` in `adagc_jax.kernels` should be.
"""

import argparse
import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from _gpu_correctness import checks
from _gpu_report import Entry, Journal, Pending
from _gpu_steps import steps

from adagc_jax import kernels

RESULTS = Path(__file__).parent / "results" / "gpu.json"
GIB = 1 << 30


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


def bandwidth(size: int, named: list[kernels.Backend]) -> Iterator[Pending]:
    """Bytes read and written per second: a copy, sums of squares, clipping."""
    x = jnp.ones((size // 4 // 1024, 1024), jnp.float32)

    def rate(function: Any, passes: int) -> Entry:
        return {"gb_per_s": passes * size / seconds_of(jax.jit(function), x) / 1e9}

    def entry(what: str, function: Any, passes: int) -> Pending:
        known = {"what": what, "bytes": size, "passes": passes}
        return known, functools.partial(rate, function, passes)

    yield entry("copy", lambda x: x + 1, 2)
    for backend in (kernels.Backend("xla"), *named):
        clip = functools.partial(
            kernels.fused_clip,
            gamma=jnp.float32(1.0),
            lambda_rel=1.04,
            beta=0.99,
            backend=backend.name,
            interpret=backend.interpret,
        )
        sums = functools.partial(kernels.sums_of_squares, backend=backend)
        yield entry(f"sums_of_squares, {backend.name}", lambda x, f=sums: f([x]), 1)
        yield entry(f"fused_clip, {backend.name}", clip, 3)


def main() -> None:
    """Measures everything and writes the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="toy sizes, for a CPU")
    parser.add_argument("--seconds", type=float, default=310.0, help="for all of it")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    platform = jax.devices()[0].platform
    if platform == "cpu" and not args.tiny:
        parser.error("there is no accelerator here: --tiny runs it on a CPU")
    journal, named = Journal(args.out, args.seconds), backends(platform)
    size = GIB >> 10 if args.tiny else GIB
    journal.measure("correctness", checks(named, args.tiny))
    journal.measure("bandwidth", bandwidth(size, named))
    journal.measure("steps", steps(named, args.tiny))
    if failures := journal.failures():
        raise SystemExit("\n".join([f"{len(failures)} failed:", *failures]))


if __name__ == "__main__":
    main()
