"""Tables of what was timed, out of `results/step_time.json` and `linearity.json`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _stamp import in_words, machine

FOLDER = Path(__file__).parent / "results"
STEP_TIME = FOLDER / "step_time.json"
LINEARITY = FOLDER / "linearity.json"
Table = tuple[str, list[str], list[list[str]]]

# Of the README's table; the others stand in the table of details.
SHOWN = ("80M",)
COMPILED = ("none", "optax.clip_by_global_norm", "adagc", "adagc (steady)")
# Heading, field and format of the details.
COLUMNS = (
    ("time / AdamW", "ratio", ".2f"),
    ("ms", "ms", ",.1f"),
    ("trace, s", "trace_s", ".1f"),
    ("compile, s", "compile_s", ".1f"),
    ("HLO instructions", "instructions", ",d"),
    ("temporary, MB", "temp_mb", ",.1f"),
    ("arrays of state", "state_arrays", ",d"),
    ("to hand them over, µs", "dispatch_us", ",.0f"),
)


def tables() -> list[dict[str, Any]]:
    """Everything that `step_time.py` has measured."""
    return json.loads(STEP_TIME.read_text())["tables"]


def name_of(table: dict[str, Any]) -> str:
    """``80M stacked, float32``."""
    return f"{table['model']} {table['layers']}, {table['gradients']}"


def made_by(measured: Sequence[dict[str, Any]]) -> str:
    """Rounds, machine, versions and date, of each kind that occurs once."""
    said = [
        f"median of {t['rounds']} interleaved rounds, on {machine(t)}, {in_words(t)}"
        for t in measured
    ]
    return "; ".join(dict.fromkeys(said))


def ratios() -> Table:
    """Ratios to AdamW alone, one column per tree."""
    shown = [t for t in tables() if t["model"] in SHOWN]
    rows = [
        [name] + [_cell(t, name, "ratio", ".2f") for t in shown]
        for name in dict.fromkeys(name for t in shown for name in t["rows"])
    ]
    rows += [
        [f"{name}: compile, s"] + [_cell(t, name, "compile_s", ".1f") for t in shown]
        for name in COMPILED
    ]
    caption = (
        "Measured: whole optimizer step divided by AdamW alone, " + made_by(shown) + "."
    )
    return caption, ["before AdamW", *map(name_of, shown)], rows


def details() -> Table:
    """Every number of every tree."""
    rows = [
        [name_of(t), name] + [_cell(t, name, field, form) for _, field, form in COLUMNS]
        for t in tables()
        for name in t.get("rows", {})
    ]
    caption = (
        "Measured: whole optimizer steps; temporary memory is the compiler's number. "
        + made_by([t for t in tables() if "rows" in t])
        + "."
    )
    header = ["tree", "before AdamW", *(heading for heading, _, _ in COLUMNS)]
    return caption, header, rows


def beside_torch() -> Table:
    """PyTorch and JAX on the same shapes and the same machine."""
    measured = [t for t in tables() if "torch" in t]
    rows = []
    for t in measured:
        both = {**t["torch"]["rows"], **t.get("rows", {})}
        rows += [
            [name_of(t), name, f"{row['ms']:,.1f}", f"{row['ratio']:.2f}"]
            for name, row in both.items()
        ]
    caption = "Measured: " + made_by([t["torch"] for t in measured]) + "; JAX: "
    caption += made_by([t for t in measured if "rows" in t])
    caption += ". A ratio is to the same library's AdamW of the same kind alone."
    return _or_missing(
        (caption, ["tree", "step", "ms", "ratio"], rows), "step_time.py --torch"
    )


def linearity() -> Table:
    """The fits of time over size."""
    header = ["method", "time per million parameters, ms", "exponent", "R²"]
    header += ["time per tensor, µs", "exponent", "R²"]
    header += ["compile time per tensor, ms", "exponent", "R²"]
    if not LINEARITY.exists():
        return _or_missing(("", header, []), "linearity.py")
    report = json.loads(LINEARITY.read_text())
    units = {"parameters": 1e9, "leaves": 1e6, "compile": 1e3}
    rows = [
        [name, *(text for kind in units for text in _fit(found[kind], units[kind]))]
        for name, found in report["methods"].items()
    ]
    any_method = next(iter(report["methods"].values()))
    sizes = [[n for n, _ in any_method[k]["points"]] for k in ("parameters", "leaves")]
    caption = (
        "Measured: each method before SGD, "
        + made_by([report])
        + f". 12 tensors of {sizes[0][0]:,} to {sizes[0][-1]:,} parameters together, "
        f"and {sizes[1][0]:,} to {sizes[1][-1]:,} tensors of 1,024. The slope of a "
        "line, its R², and the exponent of a power that is fitted instead: 1 is "
        "linear, and less says that a fixed cost still counts."
    )
    return caption, header, rows


def _fit(found: dict[str, Any], unit: float) -> list[str]:
    slope = unit * found["slope"]
    return [f"{slope:.3g}", f"{found['exponent']:.2f}", f"{found['r2']:.3f}"]


def _cell(table: dict[str, Any], name: str, field: str, form: str) -> str:
    """A number, or what stands for one that was not measured."""
    value = table.get("rows", {}).get(name, {}).get(field)
    return "not measured" if value is None else format(value, form)


def _or_missing(table: Table, command: str) -> Table:
    """The table, or one that says that nothing was measured yet."""
    _, header, rows = table
    if rows:
        return table
    return f"Not measured yet: `python benchmarks/{command}`.", header, []
