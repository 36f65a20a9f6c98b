"""Several seeds side by side: medians and spread of every clipper's numbers."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _config import Config
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

Results = Mapping[str, Mapping[str, Any]]

# Number of a result -> heading and decimals.
_COLUMNS = {
    "validation_loss": ("validation\nloss", 3),
    "worst_jump": ("worst\njump", 2),
    "max_z": ("max z", 1),
    "spike_score_percent": ("spike\nscore, %", 2),
    "clip_rate": ("clipped,\nfraction", 2),
    "ms_per_step": ("ms per\nstep", 0),
}


def each_seed(config: Config) -> list[Config]:
    """The settings of every seed, with a folder of its own if there are several."""
    if config.seeds == 1:
        return [config]
    return [
        dataclasses.replace(
            config, seed=seed, seeds=1, out=str(Path(config.out) / f"seed-{seed}")
        )
        for seed in range(config.seed, config.seed + config.seeds)
    ]


def over_seeds(results: Sequence[Results]) -> dict[str, dict[str, Any]]:
    """Per clipper and number: median, smallest, largest, and the value of each seed.

    A run that stopped has no validation loss: it counts in `stopped`. Medians are over
    the seeds that have a finite number.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in results[0]:
        own = [dict(seed[name]) for seed in results]
        for result in own:
            result["worst_jump"] = max(result["jumps"].values(), default=None)
        found[name] = {key: _spread([r[key] for r in own]) for key in _COLUMNS}
        found[name]["stopped"] = sum(bool(r["stopped"]) for r in own)
    return found


def _spread(values: Sequence[float | None]) -> dict[str, Any] | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    return {
        "median": statistics.median(known),
        "min": min(known),
        "max": max(known),
        "values": [value if value in known else None for value in values],
    }


def seeds_table(spread: Mapping[str, Mapping[str, Any]], seeds: int) -> Group:
    """One row per clipper: each median, and the smallest and largest in brackets."""
    shown = Table(box=box.SIMPLE, pad_edge=False)
    shown.add_column("clipper", no_wrap=True)
    for heading, _ in _COLUMNS.values():
        shown.add_column(heading, justify="right")
    for name, numbers in spread.items():
        cells = [_cell(numbers[key], digits) for key, (_, digits) in _COLUMNS.items()]
        if numbers["stopped"]:
            cells[0] += f"\n{numbers['stopped']} stopped"
        shown.add_row(name, *cells)
    legend = f"medians of {seeds} seeds, smallest and largest in brackets\n"
    return Group(shown, Text(legend, style="dim"))


def _cell(spread: Mapping[str, Any] | None, digits: int) -> str:
    if spread is None:
        return "-"
    low, high = spread["min"], spread["max"]
    return f"{spread['median']:.{digits}f}\n({low:.{digits}f}-{high:.{digits}f})"


def seeds_reading(spread: Mapping[str, Mapping[str, Any]]) -> str:
    """Which clipper ends lowest, and in how many seeds it beats the next."""
    losses = {
        name: numbers["validation_loss"]
        for name, numbers in spread.items()
        if numbers["validation_loss"]
        and None not in numbers["validation_loss"]["values"]
    }
    if len(losses) < 2:
        return "Fewer than two clippers finished every seed: no comparison."
    best, second = sorted(losses, key=lambda name: losses[name]["median"])[:2]
    pairs = list(zip(losses[best]["values"], losses[second]["values"], strict=True))
    wins = sum(a < b for a, b in pairs)
    apart = losses[second]["median"] - losses[best]["median"]
    return (
        f"{best} has the lowest median validation loss, {apart:.3f} below {second}, "
        f"which it beats in {wins} of {len(pairs)} seeds."
    )
