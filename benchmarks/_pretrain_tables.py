"""The README's tables of the main example over several seeds, by model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "examples" / "results"
Table = tuple[str, list[str], list[list[str]]]

# Number of a result -> heading, factor and decimals.
_COLUMNS = {
    "validation_loss": ("validation loss", 1, 3),
    "worst_jump": ("worst jump", 1, 2),
    "max_z": ("largest z", 1, 1),
    "spike_score_percent": ("spike score, %", 1, 2),
    "clip_rate": ("clipped, %", 100, 0),
}


def llama() -> Table:
    """Of the dense model."""
    return _table(RESULTS / "seeds_llama.json")


def mixtral() -> Table:
    """Of the mixture of experts."""
    return _table(RESULTS / "seeds_mixtral.json")


def _table(file: Path) -> Table:
    summary = json.loads(file.read_text())
    clippers, config = summary["over_seeds"], summary["config"]
    header = ["clipper", *(heading for heading, _, _ in _COLUMNS.values())]
    header.append("seeds in which adagc ends lower")
    rows = [
        [name]
        + [_cell(own[key], *form) for key, (_, *form) in _COLUMNS.items()]
        + [_beaten(clippers, name)]
        for name, own in clippers.items()
    ]
    bursts = ", ".join(f"{b['kind']}@{b['step']}" for b in config["bursts"])
    caption = (
        f"{config['model'].capitalize()}, {config['steps']} steps of "
        f"{config['batch_size']} x {config['length']} bytes, bursts {bursts} of "
        f"{config['burst_length']} steps; medians of {config['seeds']} seeds, smallest "
        f"and largest in brackets. {summary['hardware']}, jax "
        f"{summary['versions']['jax']}."
    )
    return caption, header, rows


def _cell(spread: Mapping[str, Any] | None, factor: int, digits: int) -> str:
    if spread is None:
        return "-"
    middle, low, high = (
        f"{factor * spread[key]:.{digits}f}" for key in ("median", "min", "max")
    )
    return f"{middle} ({low} to {high})"


def _losses(own: Mapping[str, Any]) -> list[float | None]:
    """By seed; None where a run stopped."""
    spread = own["validation_loss"]
    return spread["values"] if spread else [None] * len(own["clip_rate"]["values"])


def _beaten(clippers: Mapping[str, Any], name: str) -> str:
    """A run that stopped without a validation loss is beaten."""
    if name == "adagc":
        return ""
    ours, theirs = (_losses(clippers[n]) for n in ("adagc", name))
    pairs = list(zip(ours, theirs, strict=True))
    lower = sum(a is not None and (b is None or a < b) for a, b in pairs)
    return f"{lower} of {len(pairs)}"
