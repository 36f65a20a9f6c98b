"""Writes the README's tables from the committed results.

    python benchmarks/render.py            rewrites README.md
    python benchmarks/render.py --check    fails if README.md and the results disagree

A table stands between `<!-- begin: name -->` and `<!-- end: name -->`.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _fidelity_tables
import _study_tables
from comparison import table as comparison_table

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
STEP_TIME = ROOT / "benchmarks" / "results" / "step_time.json"
AOT = ROOT / "benchmarks" / "results" / "aot.json"
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


def aot() -> str:
    """What clipping adds to an optimizer step on pods, one row per program."""
    report = json.loads(AOT.read_text())
    columns = ["optax.clip_by_global_norm", "adagc", "adagc (steady)"]
    programs = _finished(report, "optimizer", ["none", *columns])
    rows = [
        [_program(p), p["target"]] + [_added(p["rows"], name) for name in columns]
        for p in programs
    ]
    caption = (
        f"Compiled, not run: estimates of the compiler, {_compilers(programs)}. A cell "
        "is the HBM traffic divided by that of AdamW alone (which moves "
        f"{_adamw(programs)}), and the all-reduces that it does not have, with "
        "their bytes and mesh axes. Other collectives would stand in bold."
    )
    header = ["optimizer step", "chips", *columns]
    table = markdown(header, rows)
    return f"{caption}\n\n{table}\n\n{_compiling(report['compile'])}"


def _compiling(measured: dict[str, Any]) -> str:
    seconds = {
        name: statistics.median(own) for name, own in measured["seconds"].items()
    }
    base = seconds["optax.clip_by_global_norm"]
    ratios = ", ".join(f"{name} {own / base:.2f}" for name, own in seconds.items())
    return (
        f"Processor time of compiling: {_program(measured)} on {measured['target']}, "
        f"divided by the {base:.0f} s with optax.clip_by_global_norm, medians of "
        f"interleaved rounds: {ratios}."
    )


def aot_memory() -> str:
    """Temporary memory of training steps, by what stands before AdamW."""
    report = json.loads(AOT.read_text())
    columns = ["none", "optax.clip_by_global_norm", "adagc (steady)"]
    programs = _finished(report, "train", columns)
    rows = [
        [_program(p), p["target"]]
        + [_memory(p["rows"][name], p["rows"]["none"]) for name in columns]
        for p in programs
    ]
    caption = (
        f"Temporary memory of one chip, {_compilers(programs)}, and its ratio to that "
        "of AdamW alone. Compiled, not run."
    )
    return f"{caption}\n\n{markdown(['training step', 'chips', *columns], rows)}"


def captioned(
    table: Callable[[], tuple[str, list[str], list[list[str]]]],
) -> Callable[[], str]:
    """A caption, and the table under it."""

    def text() -> str:
        caption, header, rows = table()
        return f"{caption}\n\n{markdown(header, rows)}"

    return text


def _finished(
    report: dict[str, Any], step: str, columns: list[str]
) -> list[dict[str, Any]]:
    """The programs of which every column is there, alike ones together."""
    programs = [
        p
        for p in report["programs"].values()
        if p["step"] == step and all(name in p["rows"] for name in columns)
    ]
    names = ("model", "layers", "dtype", "sharding", "axis_types", "target")
    return sorted(programs, key=lambda p: [p[name] for name in names])


def _adamw(programs: list[dict[str, Any]]) -> str:
    """Bytes per parameter of AdamW alone: the check that traffic is counted right."""
    moved = {
        f"{row['hbm_bytes'] / row['local_parameters']:.2f} B/param with {p['dtype']}"
        for p in programs
        for row in [p["rows"]["none"]]
    }
    return ", ".join(sorted(moved, reverse=True))


def _compilers(programs: list[dict[str, Any]]) -> str:
    stamps = {
        (_text(row["versions"]), row["date"])
        for program in programs
        for row in program["rows"].values()
    }
    return "; ".join(f"{versions}, {date}" for versions, date in sorted(stamps))


def _program(program: dict[str, Any]) -> str:
    mesh = " x ".join(f"{axis} {size}" for axis, size in program["mesh"])
    spread = program["sharding"]
    explicit = ", explicit axes" if program["axis_types"] == "Explicit" else ""
    model = f"{program['model']} {program['layers']}"
    return f"{model}, {program['dtype']}, {spread} ({mesh}){explicit}"


def _added(rows: dict[str, Any], name: str) -> str:
    ratio = rows[name]["hbm_bytes"] / rows["none"]["hbm_bytes"]
    more = list(rows[name]["collectives"])
    for collective in rows["none"]["collectives"]:
        if collective in more:
            more.remove(collective)
    sent = [
        ("" if kind == "all-reduce" else f"**{kind}** ")
        + f"{size} B over {'+'.join(axes)}"
        for kind, _, size, axes in more
    ]
    return "; ".join([f"{ratio:.3f}", *sent])


def _memory(row: dict[str, Any], base: dict[str, Any]) -> str:
    ratio = row["temp_bytes"] / base["temp_bytes"]
    return f"{row['temp_bytes'] / 1e6:.0f} MB ({ratio:.2f})"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return str(value)


TABLES: dict[str, Callable[[], str]] = {
    "step_time": step_time,
    "pretrain": pretrain,
    "aot": aot,
    "aot_memory": aot_memory,
    "comparison": captioned(comparison_table),
    "fidelity": captioned(_fidelity_tables.references),
    "fidelity_others": captioned(_fidelity_tables.others),
    "study": captioned(_study_tables.rules),
    "study_scenarios": captioned(_study_tables.scenarios),
    "study_variants": captioned(_study_tables.variants),
}


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
