"""Writes the README's tables from the committed results.

    python benchmarks/render.py            rewrites README.md
    python benchmarks/render.py --check    fails if README.md and the results disagree

A table stands between `<!-- begin: name -->` and `<!-- end: name -->`.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
STEP_TIME = ROOT / "benchmarks" / "results" / "step_time.json"
PRETRAIN = ROOT / "examples" / "results" / "summary.json"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def step_time() -> str:
    """Ratios to AdamW alone, one column per tree."""
    report = json.loads(STEP_TIME.read_text())
    tables = report["tables"]
    header = ["before AdamW"] + [
        f"{t['model']} {t['layers']}, {t['gradients']}" for t in tables
    ]
    rows = [
        [name] + [f"{t['rows'][name]['ratio']:.2f}" for t in tables]
        for name in tables[0]["rows"]
    ]
    compiled = [
        [f"{name}: compile, s"]
        + [f"{t['rows'][name]['compile_s']:.1f}" for t in tables]
        for name in ("none", "optax.clip_by_global_norm", "adagc", "adagc (steady)")
    ]
    versions = ", ".join(f"{k} {v}" for k, v in report["versions"].items())
    caption = (
        f"Whole optimizer step divided by AdamW alone, median of {report['rounds']} "
        f"interleaved rounds, on {report['cores']} {report['device'].upper()} cores "
        f"({report['processor']}), {versions}, {report['date']}."
    )
    return f"{caption}\n\n{markdown(header, rows + compiled)}"


def pretrain() -> str:
    """What the main example ended with."""
    summary = json.loads(PRETRAIN.read_text())
    bursts = list(next(iter(summary["results"].values()))["jumps"])
    header = ["clipper", "validation loss", *(f"jump {b}" for b in bursts)]
    header += ["largest z", "spike score, %", "clipped, %"]
    rows = [
        [
            name,
            f"{result['validation_loss']:.3f}",
            *(f"{result['jumps'][burst]:.2f}" for burst in bursts),
            f"{result['max_z']:.1f}",
            f"{result['spike_score_percent']:.2f}",
            f"{100 * result['clip_rate']:.0f}",
        ]
        for name, result in summary["results"].items()
    ]
    caption = f"Seed {summary['config']['seed']}, {_text(summary['hardware'])}."
    return f"{caption} {summary['reading']}\n\n{markdown(header, rows)}"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return str(value)


TABLES: dict[str, Callable[[], str]] = {"step_time": step_time, "pretrain": pretrain}


def rendered(readme: str) -> str:
    """The README with every table made anew."""
    for name, table in TABLES.items():
        pattern = rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)"
        if not re.search(pattern, readme, re.DOTALL):
            raise ValueError(f"README.md has no place for the table {name!r}.")
        text = table()
        readme = re.sub(
            pattern, lambda m, t=text: m[1] + t + "\n" + m[2], readme, flags=re.DOTALL
        )
    return readme


def main() -> None:
    """Rewrites or checks the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    old = README.read_text()
    new = rendered(old)
    if check and new != old:
        sys.exit("README.md differs from the results: run python benchmarks/render.py")
    README.write_text(new)


if __name__ == "__main__":
    main()
