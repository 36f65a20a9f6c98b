"""Writes all tables from the committed results.

    python benchmarks/render.py            rewrites README.md and results/TABLES.md
    python benchmarks/render.py --check    fails if they and the results disagree

A table of the README stands between `<!-- begin: name -->` and `<!-- end: name -->`;
those that have no such place in it stand in `results/TABLES.md`.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _aot_tables
import _fidelity_tables
import _pretrain_tables
import _step_tables
import _study_tables
import _targets
from comparison import table as comparison_table

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DETAILS = ROOT / "benchmarks" / "results" / "TABLES.md"
PRETRAIN = ROOT / "examples" / "results" / "summary.json"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


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


def captioned(
    table: Callable[[], tuple[str, list[str], list[list[str]]]],
) -> Callable[[], str]:
    """A caption, and the table under it."""

    def text() -> str:
        caption, header, rows = table()
        return f"{caption}\n\n{markdown(header, rows)}"

    return text


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return str(value)


TABLES: dict[str, Callable[[], str]] = {
    "step_time": captioned(_step_tables.ratios),
    "step_time_all": captioned(_step_tables.details),
    "targets": captioned(_targets.table),
    "linearity": captioned(_step_tables.linearity),
    "torch": captioned(_step_tables.beside_torch),
    "pretrain": pretrain,
    "pretrain_llama": captioned(_pretrain_tables.llama),
    "pretrain_mixtral": captioned(_pretrain_tables.mixtral),
    "aot": captioned(_aot_tables.summary),
    "aot_memory": captioned(_aot_tables.memory),
    "aot_all": captioned(_aot_tables.details),
    "comparison": captioned(comparison_table),
    "fidelity": captioned(_fidelity_tables.references),
    "fidelity_others": captioned(_fidelity_tables.others),
    "study": captioned(_study_tables.rules),
    "study_scenarios": captioned(_study_tables.scenarios),
    "study_variants": captioned(_study_tables.variants),
    "study_ablations": captioned(_study_tables.ablations),
    "study_grid": captioned(_study_tables.grid),
    "study_rates": captioned(_study_tables.rates),
}


PLACE = re.compile(
    r"(?P<begin><!-- begin: (?P<name>\w+) -->\n).*?(?P<end><!-- end: (?P=name) -->)",
    re.DOTALL,
)


def rendered(readme: str) -> str:
    """The README with the table of every place in it made anew."""

    def filled(place: re.Match[str]) -> str:
        if place["name"] not in TABLES:
            raise ValueError(
                f"README.md has a place for {place['name']!r}, which is no table: "
                f"there are {', '.join(TABLES)}."
            )
        return f"{place['begin']}{TABLES[place['name']]()}\n{place['end']}"

    begun, places = readme.count("<!-- begin: "), len(PLACE.findall(readme))
    if begun != places:
        raise ValueError(f"README.md begins {begun} tables, and {places} have an end.")
    return PLACE.sub(filled, readme)


def details(readme: str) -> str:
    """The tables that have no place in the README, one after another."""
    there = {place["name"] for place in PLACE.finditer(readme)}
    parts = [f"## {name}\n\n{TABLES[name]()}" for name in TABLES if name not in there]
    head = "# Tables of the results\n\nMade by `python benchmarks/render.py`."
    return "\n\n".join([head, *parts]) + "\n"


def main() -> None:
    """Rewrites or checks the README and the tables of details."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    readme = README.read_text()
    new = {README: rendered(readme), DETAILS: details(readme)}
    for path, text in new.items():
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.exit(
                f"{path.name} differs from the results: run python benchmarks/render.py"
            )


if __name__ == "__main__":
    main()
