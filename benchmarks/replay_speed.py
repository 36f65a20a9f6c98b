"""How long a replay takes: reading a log, a grid of settings, one setting in full.

    python benchmarks/replay_speed.py [--steps 100000] [--tensors 300]

Prints wall time and CPU time. The log for reading is a tenth as long, since its file
would otherwise be of two gigabytes; times of reading are given for the whole length.
"""

import argparse
import functools
import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from adagc_jax.replay import (
    History,
    load_history,
    make_grid,
    make_variant,
    read_history,
    replay,
    save_history,
    thresholds,
    what_if,
)
from adagc_jax.replay.console import Console


def made_up(steps: int, tensors: int) -> History:
    """Norms with noise and a spike in one of ten thousand."""
    rng = np.random.default_rng(0)
    norm = np.exp(0.2 * rng.standard_normal((steps, tensors), dtype=np.float32))
    norm[rng.random(norm.shape, dtype=np.float32) < 1e-4] *= 20
    names = tuple(f"layers/{i // 9}/block/{i % 9}/kernel" for i in range(tensors))
    count = np.arange(steps)
    return History(names, count, count, norm, np.zeros(steps, np.float32))


def write_log(history: History, path: Path) -> None:
    """The rows of a history as a JSONL logger writes them."""
    keys = [f"clip/{name}/norm_before" for name in history.names]
    with open(path, "w") as file:
        for step, norm in zip(history.steps.tolist(), history.norm, strict=True):
            row = dict(zip(keys, norm.astype(float).tolist(), strict=True))
            file.write(json.dumps({"step": step, "loss": 2.5} | row) + "\n")


def timed(what: str, function: Callable[[], Any], factor: float = 1.0) -> Any:
    """Calls a function and prints how long it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{what:<44} {factor * wall:7.1f} s, CPU {factor * cpu:7.1f} s", flush=True)
    return result


def read(history: History) -> None:
    """Times the readers on the first tenth of a history."""
    part = max(len(history.steps) // 10, 1)
    factor = len(history.steps) / part
    few = history.replace(
        steps=history.steps[:part],
        updates=history.updates[:part],
        norm=history.norm[:part],
        total=history.total[:part],
    )
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "norms.jsonl")
        write_log(few, log)
        size = factor * log.stat().st_size / 1e9
        timed(f"read JSONL ({size:.2f} GB)", lambda: read_history(log), factor)
        saved = save_history(history, Path(folder, "norms.npz"))
        timed("read .npz", lambda: load_history(saved))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--tensors", type=int, default=300)
    options = parser.parse_args()
    history = made_up(options.steps, options.tensors)
    read(history)
    console = Console()
    for method in ("adagc", "robust_gc", "zclip"):
        grid = make_grid(make_variant(method))
        with console.progress(method, len(grid) * options.steps) as tick:
            run = functools.partial(what_if, history, grid, progress=tick)
            timed(f"what_if, {len(grid)} settings of {method}", run)
    replayed = timed("replay of adagc", lambda: replay(history, make_variant()))
    names = history.names[:4]
    timed("thresholds of 4 tensors", lambda: thresholds(replayed, names))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"peak memory {peak:.1f} GB")


if __name__ == "__main__":
    main()
