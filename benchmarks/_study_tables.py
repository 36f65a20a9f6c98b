"""The README's tables of the study, out of `results/study.json`."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "study"))

from seeds import mean_of_medians, median_with_interval, paired  # noqa: E402

STUDY = HERE / "results" / "study.json"
Table = tuple[str, list[str], list[list[str]]]


def rules() -> Table:
    """Every clipper over all scenarios of the report."""
    report = json.loads(STUDY.read_text())
    scenarios = report["report"]
    names = list(next(iter(scenarios.values())))
    header = ["clipper", "setting chosen", "validation loss", "jump", "largest z"]
    header += ["spike score, %", "clipped, %", "worse than robust_gc", "better"]
    rows = []
    for name in names:
        own = [rows[name] for rows in scenarios.values()]
        middle, low, high = mean_of_medians([runs["validation"] for runs in own])
        worse, better = _against_robust(scenarios, name)
        rows.append(
            [
                name,
                _setting(report["tuning"], name),
                f"{middle:.3f} ({low:.3f} to {high:.3f})",
                _mean_of(own, "jump", 2),
                _mean_of(own, "max_z", 1),
                _mean_of(own, "spike_score", 2),
                _mean_of(own, "clip_rate", 0, 100),
                *(("", "") if name == "robust_gc" else (str(worse), str(better))),
            ]
        )
    rows.sort(key=lambda row: row[2])
    seeds = report["seeds"]
    caption = (
        f"{len(scenarios)} scenarios, {len(seeds['report'])} seeds, {report['steps']} "
        "steps of a 40-thousand-parameter byte-level Llama with AdamW. Means over "
        "scenarios of medians over seeds, with 95 % bootstrap intervals over seeds. "
        "The last columns count scenarios in which the whole interval of the paired "
        f"difference in validation loss lies on one side. {_stamp(report)}"
    )
    return caption, header, rows


def scenarios() -> Table:
    """Median validation loss by scenario."""
    report = json.loads(STUDY.read_text())
    shown = ["none", "global_gc", "zclip", "tensor_gc", "adagc", "adagc, ema"]
    shown.append("robust_gc")
    rows = [
        [name] + [_interval(rows[rule]["validation"]) for rule in shown]
        for name, rows in report["report"].items()
    ]
    caption = (
        "Median validation loss by scenario (95 % interval), every clipper with its "
        "chosen setting. A warm-up here is the learning rate's, of 12 steps."
    )
    return caption, ["scenario", *shown], rows


def variants() -> Table:
    """Mean over scenarios of the median validation loss, by model and optimizer."""
    report = json.loads(STUDY.read_text())
    shown = list(next(iter(next(iter(report["variants"].values())).values())))
    rows = []
    for setup, scenarios in report["variants"].items():
        cells = [_mean_if_run(scenarios, rule) for rule in shown]
        known = [cell for cell in cells if cell is not None]
        best = min(known) if len(known) == len(cells) else None
        rows.append([setup] + [_marked(cell, best) for cell in cells])
    some = next(iter(report["variants"].values()))
    caption = (
        f"Mean over {len(some)} scenarios ({'; '.join(some)}) of the median validation "
        f"loss of {len(report['seeds']['variants'])} seeds. Settings as chosen for "
        "Llama with AdamW; bold is lowest."
    )
    return caption, ["model and optimizer", *shown], rows


def ablations() -> Table:
    """Median validation loss by scenario, one number of AdaGC varied at a time."""
    report = json.loads(STUDY.read_text())
    settings = report["ablations"]
    header = ["clipper", "varied", *settings[0]["validation"], "mean"]
    rows = []
    for own in settings:
        medians = [float(np.median(seeds)) for seeds in own["validation"].values()]
        values = [f"{value:.3f}" for value in (*medians, np.mean(medians))]
        name = own["rule"].partition(":")[0]
        rows.append([name, own["setting"].replace("1e+30", "none"), *values])
    caption = (
        f"Median validation loss of {len(report['seeds']['variants'])} seeds; what is "
        "not named is the default, for AdaGC lambda_rel 1.04, beta 0.99, lambda_abs 1, "
        "warmup_steps 100. The scenarios' warm-up is the learning rate's, of 12 steps. "
        f"{_stamp(report)}"
    )
    return caption, header, rows


def grid() -> Table:
    """Settings of robust_gc around its defaults, on the tuning scenarios."""
    report = json.loads(STUDY.read_text())
    seeds = len(report["seeds"]["tuning"])
    rows = [[row["setting"], f"{row['score']:.3f}"] for row in report["grid"]]
    caption = (
        f"Mean over {len(report['grid'][0]['validation'])} tuning scenarios of the "
        f"median validation loss of {seeds} seeds."
    )
    rows.sort(key=lambda row: row[1])
    return caption, ["robust_gc", "validation loss"], rows


def rates() -> Table:
    """Without clipping, where nothing happens, at three peak learning rates."""
    report = json.loads(STUDY.read_text())
    rows = []
    for setup, losses in report["rates"].items():
        cells = [f"{loss:.3f} ({peak})" for peak, loss in losses.items()]
        rows.append([setup, *cells])
    caption = (
        "Without clipping, where nothing happens: median validation loss of "
        f"{len(report['seeds']['tuning'])} seeds, by peak learning rate in brackets."
    )
    return caption, ["model and optimizer", "half the rate", "used", "twice"], rows


def _mean_if_run(scenarios: Mapping[str, Any], rule: str) -> float | None:
    """Mean of medians; None if a scenario has not been trained."""
    if any(rule not in rows for rows in scenarios.values()):
        return None
    rows = [rows[rule]["validation"] for rows in scenarios.values()]
    return mean_of_medians(rows)[0]


def _marked(value: float | None, best: float | None) -> str:
    if value is None:
        return "not run yet"
    return f"**{value:.3f}**" if value == best else f"{value:.3f}"


def _against_robust(scenarios: Mapping[str, Any], name: str) -> tuple[int, int]:
    """In how many scenarios a clipper is surely worse, and surely better."""
    worse = better = 0
    for rows in scenarios.values():
        apart = paired(rows[name], rows["robust_gc"], "validation")
        _, low, high = median_with_interval(apart)
        worse, better = worse + (low > 0), better + (high < 0)
    return worse, better


def _setting(tuning: Mapping[str, Any], name: str) -> str:
    method = name.removesuffix(", by default")
    if method not in tuning:
        raise ValueError(f"{STUDY.name} has no tuning of {method!r}")
    found = tuning[method]
    return found["chosen"] if method == name else found["settings"][0]["setting"]


def _mean_of(
    cells: list[dict[str, Any]], number: str, digits: int, factor: float = 1
) -> str:
    medians = [np.median(c[number]) for c in cells if c[number][0] is not None]
    return f"{factor * np.mean(medians):.{digits}f}"


def _interval(values: list[float]) -> str:
    middle, low, high = median_with_interval(values)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def _stamp(report: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in report["versions"].items())
    hardware = report["hardware"]
    return (
        f"{hardware['cores']} CPU cores ({hardware['processor']}), {versions}, "
        f"{report['date']}."
    )
