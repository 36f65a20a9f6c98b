"""Times whole optimizer steps, interleaved, and writes ratios to AdamW alone.

    python benchmarks/step_time.py
    python benchmarks/step_time.py --models 10M --rounds 5
    python benchmarks/step_time.py --clippers "adagc,adagc + clip_metrics" --out x.json

Every method runs once per round, in turn, on the same gradients; a ratio is the median
over rounds of its time divided by AdamW's in the same round, so that a busy machine
slows both. Reports compile time and temporary memory as well. The result goes to
`benchmarks/results/step_time.json`, from which `render.py` makes the README's table.
"""

import argparse
import datetime
import functools
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from models import MODELS, gradients, parameter_count

import adagc_jax

RESULTS = Path(__file__).parent / "results" / "step_time.json"

CLIPPERS: dict[str, Callable[[bool], optax.GradientTransformation]] = {
    "none": lambda stacked: optax.identity(),
    "optax.clip_by_global_norm": lambda stacked: optax.clip_by_global_norm(1.0),
    "optax.adaptive_grad_clip": lambda stacked: optax.adaptive_grad_clip(0.01),
    "optax.clip_by_block_rms": lambda stacked: optax.clip_by_block_rms(1.0),
    "adagc": lambda stacked: adagc_jax.adagc(groups=per_layer(stacked)),
    "adagc (steady)": lambda stacked: adagc_jax.adagc(
        groups=per_layer(stacked), phase="steady"
    ),
    "robust_gc": lambda stacked: adagc_jax.robust_gc(groups=per_layer(stacked)),
    "global_gc": lambda stacked: adagc_jax.global_gc(),
    "tensor_gc": lambda stacked: adagc_jax.tensor_gc(groups=per_layer(stacked)),
    "agc": lambda stacked: adagc_jax.agc(stacked={"layers/": 0} if stacked else ()),
    "zclip": lambda stacked: adagc_jax.zclip(),
    "adagc + clip_metrics": lambda stacked: adagc_jax.adagc(groups=per_layer(stacked)),
}
# What the step reads out of its new state, besides making it.
READS = {"adagc + clip_metrics": adagc_jax.clip_metrics}


def per_layer(stacked: bool) -> adagc_jax.Groups:
    """Groups in which every layer of a stacked tensor stands alone."""
    return adagc_jax.stacked({"layers/": 0} if stacked else ())


class Contestant:
    """One compiled optimizer step with its own state."""

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        grads: Any,
        read: Callable[[Any], Any] | None = None,
    ):
        self.grads = grads
        self.params = jax.tree.map(lambda g: jnp.array(g, jnp.float32), grads)
        self.state = optimizer.init(self.params)

        @functools.partial(jax.jit, donate_argnums=(1, 2))
        def step(grads, state, params):
            updates, state = optimizer.update(grads, state, params)
            numbers = read(state) if read else {}
            return state, optax.apply_updates(params, updates), numbers

        started = time.perf_counter()
        lowered = step.lower(self.grads, self.state, self.params)
        self.trace_seconds = time.perf_counter() - started
        started = time.perf_counter()
        self.step = lowered.compile()
        self.compile_seconds = time.perf_counter() - started
        memory = self.step.memory_analysis()
        self.temp_bytes = memory.temp_size_in_bytes if memory else 0
        self.seconds: list[float] = []

    def run(self) -> None:
        """Makes one step and notes its time."""
        started = time.perf_counter()
        self.state, self.params, numbers = self.step(
            self.grads, self.state, self.params
        )
        jax.block_until_ready((self.params, numbers))
        self.seconds.append(time.perf_counter() - started)


def interleaved(contestants: dict[str, Contestant], rounds: int) -> dict[str, Any]:
    """Runs all in turn, round after round; ratios are to the one called "none"."""
    warmup = 2
    for _ in range(rounds + warmup):
        for contestant in contestants.values():
            contestant.run()
    base = np.array(contestants["none"].seconds[warmup:])
    rows = {}
    for name, contestant in contestants.items():
        seconds = np.array(contestant.seconds[warmup:])
        rows[name] = {
            "ratio": round(float(np.median(seconds / base)), 3),
            "ms": round(1e3 * float(np.median(seconds)), 2),
            "trace_s": round(contestant.trace_seconds, 2),
            "compile_s": round(contestant.compile_seconds, 2),
            "temp_mb": round(contestant.temp_bytes / 1e6, 2),
        }
    return rows


def measure(
    model: str, stacked: bool, dtype: Any, rounds: int, names: Sequence[str]
) -> dict[str, Any]:
    """Times clippers on one tree."""
    grads = gradients(MODELS[model], stacked, dtype)
    contestants = {
        name: Contestant(
            optax.chain(CLIPPERS[name](stacked), optax.adamw(1e-3)),
            grads,
            READS.get(name),
        )
        for name in names
    }
    rows = interleaved(contestants, rounds)
    return {
        "model": model,
        "layers": "stacked" if stacked else "unrolled",
        "gradients": jnp.dtype(dtype).name,
        "parameters": parameter_count(grads),
        "tensors": len(jax.tree.leaves(grads)),
        "rows": rows,
    }


def main() -> None:
    """Measures every tree and writes the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="10M,80M", help="of 10M,80M,300M")
    parser.add_argument("--layers", default="unrolled,stacked")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument(
        "--clippers",
        default=",".join(CLIPPERS),
        help="which rows to measure; none is always measured",
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    names = list(dict.fromkeys(["none", *options.clippers.split(",")]))
    if unknown := [name for name in names if name not in CLIPPERS]:
        parser.error(f"--clippers: {unknown} are not among {', '.join(CLIPPERS)}")
    tables = []
    for model in options.models.split(","):
        for layers in options.layers.split(","):
            for dtype in options.dtypes.split(","):
                table = measure(
                    model, layers == "stacked", dtype, options.rounds, names
                )
                tables.append(table)
                print(model, layers, dtype)
                for name, row in table["rows"].items():
                    print(f"  {name:28} {row}", flush=True)
    report = {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "versions": {"jax": jax.__version__, "optax": optax.__version__},
        "rounds": options.rounds,
        "tables": tables,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
