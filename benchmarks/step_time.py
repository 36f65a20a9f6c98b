"""Times whole optimizer steps, interleaved, and writes ratios to AdamW alone.

    python benchmarks/step_time.py
    python benchmarks/step_time.py --models 10M --rounds 5
    python benchmarks/step_time.py --clippers "adagc,adagc + clip_metrics" --out x.json
    pip install torch zclip && python benchmarks/step_time.py --torch

Measures time, compile time, instructions and temporary memory of the program, and what
handing over the state costs. With `--torch` PyTorch's own clipping and AdamW run on the
same shapes, for float32. What one call measures replaces the same tree's numbers in
`benchmarks/results/step_time.json` and leaves those of other trees, each with its own
date and versions; `render.py` makes tables of them.
"""

import argparse
import itertools
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from _stamp import measured
from _steps import CLIPPERS, adamw_after, race
from models import MODELS, gradients, parameter_count

RESULTS = Path(__file__).parent / "results" / "step_time.json"
KEY = ("model", "layers", "gradients")


def measure(
    model: str, layers: str, dtype: str, rounds: int, names: Sequence[str]
) -> dict[str, Any]:
    """Times clippers on one tree."""
    stacked = layers == "stacked"
    grads = gradients(MODELS[model], stacked, jnp.dtype(dtype))
    axes = MODELS[model].stacked_axes(stacked)
    optimizers = {name: adamw_after(name, axes) for name in names}
    return {
        "model": model,
        "layers": layers,
        "gradients": dtype,
        "parameters": parameter_count(grads),
        "tensors": len(jax.tree.leaves(grads)),
        "rounds": rounds,
        **measured(),
        "rows": race(optimizers, grads, rounds),
    }


def measure_torch(model: str, layers: str, rounds: int) -> dict[str, Any]:
    """Times PyTorch on the shapes of one tree."""
    import _torch_steps

    shapes = MODELS[model].shapes(layers == "stacked")
    leaves = jax.tree.leaves(shapes, is_leaf=lambda x: isinstance(x, tuple))
    rows = _torch_steps.measure(leaves, rounds)
    return {**measured("torch", "zclip"), "rounds": rounds, "rows": rows}


def apart(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What a function returns, from a process of its own.

    Memory that one tree has freed in small pieces stays with its process, and the next
    tree would not fit beside it.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
        return pool.submit(function, *arguments).result()


def merged(old: Sequence[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """The tables with a new one in the place of the same tree's old one.

    Where only one of JAX and PyTorch was measured, the other's numbers stay.
    """
    key = [new[name] for name in KEY]
    same = [table for table in old if [table[name] for name in KEY] == key]
    rest = [table for table in old if table not in same]
    kept = same[0] if same else {}
    if "rows" in new:
        kept = {"torch": kept["torch"]} if "torch" in kept else {}
    tables = [*rest, {**kept, **new}]
    order = list(MODELS)
    return sorted(
        tables,
        key=lambda t: (order.index(t["model"]), t["layers"] == "stacked", t[KEY[2]]),
    )


def trees(options: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Model, layers and dtype of every tree that was asked for."""
    lists = (options.models, options.layers, options.dtypes)
    yield from itertools.product(*(text.split(",") for text in lists))


def parsed() -> tuple[argparse.Namespace, list[str]]:
    """The options, and the names of the contestants."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", default="10M,80M,300M,2000 vectors", help="keys of models.MODELS")
    add("--layers", default="unrolled,stacked")
    add("--dtypes", default="float32,bfloat16")
    add("--clippers", default=",".join(CLIPPERS), help="none is always measured")
    add("--torch", action="store_true", help="PyTorch as well")
    add("--only-torch", action="store_true", help="PyTorch and nothing else")
    add("--rounds", type=int, default=15)
    add("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    names = list(dict.fromkeys(["none", *options.clippers.split(",")]))
    if unknown := [name for name in names if name not in CLIPPERS]:
        parser.error(f"--clippers: {unknown} are not among {', '.join(CLIPPERS)}")
    if unknown := [name for name in options.models.split(",") if name not in MODELS]:
        parser.error(f"--models: {unknown} are not among {', '.join(MODELS)}")
    return options, names


def main() -> None:
    """Measures every tree and writes it at once."""
    options, names = parsed()
    for model, layers, dtype in trees(options):
        table: dict[str, Any] = dict(zip(KEY, (model, layers, dtype), strict=True))
        if not options.only_torch:
            table = apart(measure, model, layers, dtype, options.rounds, names)
        # In PyTorch a gradient has the dtype of its parameter.
        if (options.torch or options.only_torch) and dtype == "float32":
            table["torch"] = apart(measure_torch, model, layers, options.rounds)
        if len(table) > len(KEY):
            save(table, options.out)
        print(model, layers, dtype)
        for rows in (table.get("rows", {}), table.get("torch", {}).get("rows", {})):
            for name, row in rows.items():
                print(f"  {name:28} {row}", flush=True)


def save(table: dict[str, Any], out: Path) -> None:
    """Puts one tree into the file of results."""
    old = json.loads(out.read_text())["tables"] if out.exists() else []
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"tables": merged(old, table)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
