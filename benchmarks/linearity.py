"""Whether each method's cost grows in proportion to parameters and to leaves.

    python benchmarks/linearity.py
    python benchmarks/linearity.py --methods adagc,zclip --rounds 5

Every method stands before plain SGD, once on 12 tensors that grow and once on ever more
tensors of 1,024 elements, with all sizes of a method interleaved. The times are fitted
by a line, and by a power of the size. Compile time is fitted over the number of leaves.
Writes `results/linearity.json`, from which `render.py` makes a table.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from _stamp import measured
from _steps import CLIPPERS, GUARDED, WARMUP, Contestant

RESULTS = Path(__file__).parent / "results" / "linearity.json"
METHODS = [name for name in CLIPPERS if "metrics" not in name and name != GUARDED]
TENSORS, ELEMENTS = 12, 1024
Points = list[tuple[int, float]]


def fit(points: Sequence[tuple[int, float]]) -> dict[str, float]:
    """A line through ``(size, seconds)``, and a power of the size.

    Relative errors are what the line makes small: all sizes count alike.
    """
    sizes, seconds = np.array(points, float).T
    slope, intercept = np.polyfit(sizes, seconds, 1, w=1 / seconds)
    weights = 1 / seconds**2
    rest = np.sum(weights * (seconds - slope * sizes - intercept) ** 2)
    spread = seconds - np.average(seconds, weights=weights)
    exponent = np.polyfit(np.log(sizes), np.log(seconds), 1)[0]
    return {
        "slope": float(slope),
        "intercept": float(intercept),
        "r2": round(float(1 - rest / np.sum(weights * spread**2)), 4),
        "exponent": round(float(exponent), 3),
    }


def tree(leaves: int, elements: int) -> dict[str, jax.Array]:
    """Gradients of that many equal vectors."""
    values = 0.01 * jax.random.normal(jax.random.key(0), (elements,))
    return {f"{i:05}": values + 0.0 for i in range(leaves)}


def time_trees(
    name: str, trees: Sequence[dict[str, jax.Array]], rounds: int
) -> list[Contestant]:
    """A method on all trees, interleaved."""
    clip = CLIPPERS[name]({})
    contestants = [Contestant(optax.chain(clip, optax.sgd(1e-3)), t) for t in trees]
    for _ in range(rounds + WARMUP):
        for contestant in contestants:
            contestant.run()
    return contestants


def medians(sizes: Sequence[int], contestants: Sequence[Contestant]) -> Points:
    """The median time of a step at each size."""
    seconds = [float(np.median(c.seconds[WARMUP:])) for c in contestants]
    return list(zip(sizes, seconds, strict=True))


def measure(
    name: str, parameters: Sequence[int], leaves: Sequence[int], rounds: int
) -> dict[str, Any]:
    """Points and fits of one method."""
    large = time_trees(name, [tree(TENSORS, n // TENSORS) for n in parameters], rounds)
    points = {"parameters": medians(parameters, large)}
    del large
    many = time_trees(name, [tree(n, ELEMENTS) for n in leaves], rounds)
    points["leaves"] = medians(leaves, many)
    compiling = [(n, c.compile_seconds) for n, c in zip(leaves, many, strict=True)]
    points["compile"] = compiling
    return {kind: {"points": own, **fit(own)} for kind, own in points.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--methods", default=",".join(METHODS))
    add("--parameters", default="6,12,24,48,96", help="in millions")
    add("--leaves", default="128,256,512,1024,2048")
    add("--rounds", type=int, default=15)
    add("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if unknown := [n for n in options.methods.split(",") if n not in CLIPPERS]:
        parser.error(f"--methods: {unknown} are not among {', '.join(METHODS)}")
    parameters = [round(1e6 * float(n)) for n in options.parameters.split(",")]
    leaves = [int(n) for n in options.leaves.split(",")]
    report = {"rounds": options.rounds, **measured(), "methods": {}}
    for name in options.methods.split(","):
        found = measure(name, parameters, leaves, options.rounds)
        report["methods"][name] = found
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        for kind, own in found.items():
            print(f"{name:28} {kind:11} {own}", flush=True)


if __name__ == "__main__":
    main()
