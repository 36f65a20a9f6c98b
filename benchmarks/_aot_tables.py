"""Tables of what was compiled ahead of time, out of `results/aot.json`."""

import json
import statistics
from pathlib import Path
from typing import Any

from _stamp import in_words
from _steps import GUARDED

AOT = Path(__file__).parent / "results" / "aot.json"
Table = tuple[str, list[str], list[list[str]]]
CLIP, ADAGC, STEADY = "optax.clip_by_global_norm", "adagc", "adagc (steady)"
# The README's rows: one program per model, for this target; the rest is in the details.
POD = "v5p-512"
ESTIMATE = "Estimates of the compiler, nothing has run: "


def summary() -> Table:
    """What clipping adds to an optimizer step, a row per model."""
    columns = [CLIP, ADAGC, STEADY, GUARDED]
    programs = [
        p
        for p in _finished("optimizer", ["none", *columns])
        if p["target"] == POD
        and p["dtype"] == "float32"
        and p["axis_types"] == "Auto"
        and "FSDP" in p["sharding"]
    ]
    rows = [
        [_program(p)] + [_added(p["rows"], name) for name in columns] for p in programs
    ]
    compiling = json.loads(AOT.read_text())["compile"]
    caption = (
        f"{ESTIMATE}{POD}, {_compilers(programs)}. A cell is the HBM traffic divided "
        f"by that of AdamW alone (which moves {_adamw(programs)}), and the all-reduces "
        "that it does not have, with their bytes and mesh axes. Other collectives "
        f"would stand in bold. {_compiling(compiling)}"
    )
    return caption, ["optimizer step", *columns], rows


def details() -> Table:
    """Every optimizer step that was compiled, with every number."""
    programs = _finished("optimizer", ["none"])
    rows = [
        [_program(p), p["target"], name, *_numbers(p["rows"], name)]
        for p in programs
        for name in p["rows"]
    ]
    caption = (
        f"{ESTIMATE}{_compilers(programs)}. Traffic and cycles are divided by those of "
        "AdamW alone; collectives are those that it does not have. Compile time is "
        "measured, in seconds of the processor, once and not interleaved."
    )
    header = ["optimizer step", "chips", "before AdamW", "traffic", "cycles"]
    header += ["temporary, MB", "operations", "compile, s", "collectives"]
    return caption, header, rows


def memory() -> Table:
    """Temporary memory of training steps, by what stands before AdamW."""
    columns = ["none", CLIP, STEADY]
    programs = _finished("train", columns)
    rows = [
        [_program(p), p["target"]]
        + [_memory(p["rows"][name], p["rows"]["none"]) for name in columns]
        for p in programs
    ]
    caption = (
        f"{ESTIMATE}temporary memory of one chip, {_compilers(programs)}, and its "
        "ratio to that of AdamW alone."
    )
    return caption, ["training step", "chips", *columns], rows


def _finished(step: str, columns: list[str]) -> list[dict[str, Any]]:
    """The programs of which every column is there, alike ones together."""
    programs = [
        p
        for p in json.loads(AOT.read_text())["programs"].values()
        if p["step"] == step and all(name in p["rows"] for name in columns)
    ]
    names = ("model", "layers", "dtype", "sharding", "axis_types", "target")
    return sorted(programs, key=lambda p: [p[name] for name in names])


def _numbers(rows: dict[str, Any], name: str) -> list[str]:
    row, base = rows[name], rows["none"]
    cycles = "none given"
    if row.get("cycles") and base.get("cycles"):
        cycles = f"{row['cycles'] / base['cycles']:.3f}"
    return [
        f"{row['hbm_bytes'] / base['hbm_bytes']:.3f}",
        cycles,
        f"{row['temp_bytes'] / 1e6:,.1f}",
        f"{row['operations']:,}",
        f"{row['seconds']:.0f}",
        "; ".join(_sent(rows, name)) or "none",
    ]


def _compiling(measured: dict[str, Any]) -> str:
    seconds = {
        name: statistics.median(own) for name, own in measured["seconds"].items()
    }
    base = seconds[CLIP]
    ratios = ", ".join(f"{name} {own / base:.2f}" for name, own in seconds.items())
    return (
        f"Measured, processor time of compiling: {_program(measured)}, divided by the "
        f"{base:.0f} s with {CLIP}, medians of interleaved rounds: {ratios}."
    )


def _adamw(programs: list[dict[str, Any]]) -> str:
    """Bytes per parameter of AdamW alone: the check that traffic is counted right."""
    moved = {
        f"{row['hbm_bytes'] / row['local_parameters']:.2f} B/param with {p['dtype']}"
        for p in programs
        for row in [p["rows"]["none"]]
    }
    return ", ".join(sorted(moved, reverse=True))


def _compilers(programs: list[dict[str, Any]]) -> str:
    stamps = {in_words(row) for p in programs for row in p["rows"].values()}
    return "; ".join(sorted(stamps))


def _program(program: dict[str, Any]) -> str:
    mesh = " x ".join(f"{axis} {size}" for axis, size in program["mesh"])
    spread = program["sharding"]
    explicit = ", explicit axes" if program["axis_types"] == "Explicit" else ""
    model = f"{program['model']} {program['layers']}"
    return f"{model}, {program['dtype']}, {spread} ({mesh}){explicit}"


def _added(rows: dict[str, Any], name: str) -> str:
    ratio = rows[name]["hbm_bytes"] / rows["none"]["hbm_bytes"]
    return "; ".join([f"{ratio:.3f}", *_sent(rows, name)])


def _sent(rows: dict[str, Any], name: str) -> list[str]:
    more = list(rows[name]["collectives"])
    for collective in rows["none"]["collectives"]:
        if collective in more:
            more.remove(collective)
    return [
        ("" if kind == "all-reduce" else f"**{kind}** ")
        + f"{size} B over {'+'.join(axes)}"
        for kind, _, size, axes in more
    ]


def _memory(row: dict[str, Any], base: dict[str, Any]) -> str:
    ratio = row["temp_bytes"] / base["temp_bytes"]
    return f"{row['temp_bytes'] / 1e6:.0f} MB ({ratio:.2f})"
