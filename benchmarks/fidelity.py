"""How far each method is from its definition, and from other implementations.

    python benchmarks/fidelity.py
    pip install torch zclip pytorch_optimizer && python benchmarks/fidelity.py --torch

A long stream of random gradients, with spikes, idle tensors and drifting norms, goes
through each method in one compiled scan, and through its float64 reference (written
from the papers, `tests/reference.py`) one step at a time. Errors are relative, of whole
tensors, and the largest over all tensors and steps. Writes `results/fidelity.json`.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from _stamp import made, measured
from _streams import (
    SHAPES,
    Step,
    error,
    rounding,
    scanned,
    stacked,
    stepped,
    stream,
    weights,
)

import adagc_jax

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import reference  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "fidelity.json"


def methods(
    params: dict[str, np.ndarray],
) -> dict[str, tuple[optax.GradientTransformation, Callable[[], Step]]]:
    """Every method, and what makes its float64 reference."""
    # As NFNets has it for two and three axes.
    units = {name: (0,) for name, shape in SHAPES.items() if len(shape) > 1}
    robust: dict[str, Any] = {
        "lambda_rel": 1.3,
        "beta": 0.99,
        "tail": 3.0,
        "patience": 6,
    }
    return {
        "adagc": (adagc_jax.adagc(), lambda: reference.AdaGC().update),
        "adagc, ema": (
            adagc_jax.adagc(warmup_init="ema"),
            lambda: reference.AdaGC(warmup_init="ema").update,
        ),
        "adagc, whole tree": (
            adagc_jax.adagc(groups=adagc_jax.whole_tree()),
            lambda: reference.AdaGC(scope="global").update,
        ),
        "robust_gc": (
            adagc_jax.robust_gc(**robust, warmup_steps=20),
            lambda: (
                reference.AdaGC(**robust, warmup_steps=20, warmup_init="ema").update
            ),
        ),
        "agc": (
            adagc_jax.agc(unit="output"),
            lambda: lambda g: reference.agc(g, params, reduce_axes=units),
        ),
        "global_gc": (
            adagc_jax.global_gc(1.0),
            lambda: lambda g: reference.global_gc(g, 1.0),
        ),
        "tensor_gc": (
            adagc_jax.tensor_gc(0.5),
            lambda: lambda g: reference.tensor_gc(g, 0.5),
        ),
        "zclip": (adagc_jax.zclip(), lambda: reference.ZClip().update),
        "clip_by_value": (
            adagc_jax.clip_by_value(0.02),
            lambda: lambda g: reference.clip_by_value(g, 0.02),
        ),
    }


def against_references(steps: int) -> dict[str, dict[str, float]]:
    """Error of each method by gradient dtype, and of rounding the right answer."""
    params = weights(1)
    errors: dict[str, dict[str, float]] = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        grads = stream(steps, 0, dtype)
        for name, (clip, exact) in methods(params).items():
            want = stepped(exact(), grads, np.float64)
            got = scanned(clip, grads, params)
            label = jnp.dtype(dtype).name
            row = errors.setdefault(name, {})
            row[label] = error(got, want)
            row[f"{label}, rounding alone"] = rounding(want, dtype)
    return errors


def against_optax(steps: int) -> dict[str, float]:
    """Error between ours and optax's, both compiled, in float32."""
    params = weights(1)
    grads = stream(steps, 0, jnp.float32, idle=False)
    pairs = {
        "global_gc, optax.clip_by_global_norm": (
            adagc_jax.global_gc(1.0),
            optax.clip_by_global_norm(1.0),
        ),
        "agc, optax.adaptive_grad_clip": (
            adagc_jax.agc(),
            optax.adaptive_grad_clip(0.01),
        ),
        "clip_by_value, optax.clip": (adagc_jax.clip_by_value(0.02), optax.clip(0.02)),
    }
    return {
        name: error(scanned(ours, grads, params), scanned(theirs, grads, params))
        for name, (ours, theirs) in pairs.items()
    }


def against_torch(steps: int) -> dict[str, float]:
    """Error between ours and the PyTorch implementations, in float32 on CPU."""
    import _fidelity_torch as other

    params = weights(1)
    grads = stream(steps, 0, jnp.float32, idle=False)
    # Of three axes everyone has another idea of a unit.
    del grads["out"], params["out"]
    pairs = {
        "global_gc(eps=1e-6), torch clip_grad_norm_": (
            adagc_jax.global_gc(1.0, eps=1e-6),
            other.clip_grad_norm(1.0),
        ),
        "clip_by_value, torch clip_grad_value_": (
            adagc_jax.clip_by_value(0.02),
            other.clip_grad_value(0.02),
        ),
        'agc(layout="OI"), pytorch_optimizer agc': (
            adagc_jax.agc(layout="OI"),
            other.agc(params),
        ),
        "zclip, zclip.ZClip": (adagc_jax.zclip(), other.zclip()),
    }
    return {
        name: error(scanned(ours, grads, params), stepped(theirs, grads, np.float32))
        for name, (ours, theirs) in pairs.items()
    }


def against_goldens() -> dict[str, float]:
    """Error against what the authors' code, zclip and timm returned."""
    authors, zclip, timm = (
        json.loads((ROOT / "tests" / "data" / f"{name}.json").read_text())
        for name in ("adagc_authors", "zclip", "agc_timm")
    )
    found = {}
    for data, method in ((authors, adagc_jax.adagc), (zclip, adagc_jax.zclip)):
        for name, case in data["cases"].items():
            whole: dict[str, Any] = (
                {"groups": adagc_jax.whole_tree()} if "global" in name else {}
            )
            clip = method(**case["config"], **whole)
            got = scanned(clip, stacked(data["gradients"]), {})
            found[f"{method.__name__}, {name}"] = error(got, stacked(case["clipped"]))
    clip = adagc_jax.agc(0.01, eps=1e-3, layout="OI")
    for case in timm["cases"]:
        params, grads, want = (
            stacked([{"w": case[key]}]) for key in ("param", "grad", "clipped")
        )
        got = scanned(clip, grads, {"w": params["w"][0]})
        found[f"agc, timm {case['shape']}"] = error(got, want)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--torch", action="store_true", help="PyTorch as well")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    report: dict[str, Any] = {
        **measured(),
        "steps": args.steps,
        "references": against_references(args.steps),
        "optax": against_optax(args.steps),
        "goldens": against_goldens(),
    }
    if args.torch:
        torch = made("torch", "pytorch_optimizer", "zclip")
        report["torch_versions"] = torch["versions"]
        report["torch"] = against_torch(args.steps)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
