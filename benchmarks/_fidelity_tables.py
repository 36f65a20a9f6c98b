"""The README's tables of errors, out of `results/fidelity.json`."""

import json
from pathlib import Path

FIDELITY = Path(__file__).parent / "results" / "fidelity.json"
Table = tuple[str, list[str], list[list[str]]]


def references() -> Table:
    """Each method against its definition in float64."""
    report = json.loads(FIDELITY.read_text())
    rows = [
        [name] + [f"{error:.1e}" for error in errors.values()]
        for name, errors in report["references"].items()
    ]
    columns = list(next(iter(report["references"].values())))
    versions = ", ".join(f"{k} {v}" for k, v in report["versions"].items())
    caption = (
        f"Largest relative error of any tensor in {report['steps']} steps against a "
        "float64 reference, and what rounding the exact answer to the gradients' dtype "
        f"costs alone. {report['device'].upper()}, {versions}, {report['date']}."
    )
    return caption, ["method", *columns], rows


def others() -> Table:
    """Each method against the implementations of others."""
    report = json.loads(FIDELITY.read_text())
    versions = ", ".join(f"{k} {v}" for k, v in report["torch_versions"].items())
    goldens = report["goldens"]
    worst = {
        "AdaGC, the authors' code": max(
            e for name, e in goldens.items() if name.startswith("adagc")
        ),
        "ZClip 1.0.0, recorded": max(
            e for name, e in goldens.items() if name.startswith("zclip")
        ),
        "AGC, timm 1.0.31, recorded": max(
            e for name, e in goldens.items() if name.startswith("agc")
        ),
    }
    found = {**report["optax"], **report["torch"], **worst}
    rows = [[name, f"{error:.1e}"] for name, error in found.items()]
    caption = (
        f"Largest relative error between two implementations in float32; {versions}."
    )
    return caption, ["ours, theirs", "error"], rows
