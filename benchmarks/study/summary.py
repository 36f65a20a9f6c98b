"""The committed result: every number by seed, what was chosen, and two pictures."""

import datetime
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pictures
import plan
from cells import Task, load
from scenarios import Scenario


def write(sizes: plan.Sizes, folder: Path, out: Path) -> Iterator[str]:
    """Writes `study.json` and the pictures; yields what it wrote."""
    report = {
        "date": datetime.date.today().isoformat(),
        "versions": {
            p: importlib.metadata.version(p) for p in ("jax", "optax", "flax")
        },
        "hardware": {"cores": os.cpu_count(), "processor": platform.machine()},
        "steps": sizes.steps,
        "seeds": {
            "tuning": sizes.tuning_seeds,
            "report": sizes.report_seeds,
            "variants": sizes.variant_seeds,
        },
        "rates": {
            setup.name: {
                f"{task.setup.peak_lr:g}": plan.scores(task, folder)[0]
                for task in plan.rate_tasks(setup, sizes)
            }
            for setup in sizes.rates
        },
        "tuning": {rule.name: _tuning(rule, sizes, folder) for rule in sizes.rules},
        "grid": [
            row
            for task in plan.tasks("grid", sizes, folder)
            for row in _scored(task, folder)
        ],
        "report": _by_scenario(
            sizes.report, plan.tasks("report", sizes, folder), folder
        ),
        "variants": {
            setup.name: _by_scenario(
                sizes.varied,
                [
                    plan.variant_task(setup, rule, sizes, folder)
                    for rule in sizes.rules
                    if rule.name in plan.FINALISTS
                ],
                folder,
            )
            for setup in sizes.variants
        },
        "ablations": _ablations(sizes, folder),
    }
    file = out / "study.json"
    file.write_text(json.dumps(_rounded(report), indent=1) + "\n")
    yield str(file)
    for picture in pictures.draw(report, sizes, folder, out):
        yield str(picture)


def _tuning(rule: Any, sizes: plan.Sizes, folder: Path) -> dict[str, Any]:
    scored = _scored(plan.tuning_task(rule, sizes), folder)
    chosen = rule.describe(plan.chosen_setting(rule, sizes, folder))
    return {"chosen": chosen, "settings": scored}


def _scored(task: Task, folder: Path) -> list[dict[str, Any]]:
    """Every setting with its score, and its median validation loss by scenario."""
    cells = {s.name: load(task, folder, s) for s in task.scenarios}
    return [
        {
            "setting": task.rule.describe(setting),
            "score": score,
            "validation": {
                name: sorted(cell[i]["validation"])[len(task.seeds) // 2]
                for name, cell in cells.items()
                if cell
            },
        }
        for i, (setting, score) in enumerate(
            zip(task.settings, plan.scores(task, folder), strict=True)
        )
    ]


def _ablations(sizes: plan.Sizes, folder: Path) -> list[dict[str, Any]]:
    """Every setting with its validation losses by scenario and seed."""
    rows = []
    for task in plan.tasks("ablations", sizes, folder):
        cells = {s.name: load(task, folder, s) or [] for s in task.scenarios}
        rows += [
            {
                "rule": task.rule.name,
                "setting": task.rule.describe(setting),
                "validation": {
                    name: cell[i]["validation"] for name, cell in cells.items() if cell
                },
            }
            for i, setting in enumerate(task.settings)
        ]
    return rows


def _by_scenario(
    scenarios: tuple[Scenario, ...], tasks: list[Task], folder: Path
) -> dict[str, Any]:
    """Scenario -> contestant -> number -> seeds; a cell not trained is left out."""
    found: dict[str, Any] = {}
    for scenario in scenarios:
        rows = found.setdefault(scenario.name, {})
        for task in tasks:
            for i, numbers in enumerate(load(task, folder, scenario) or []):
                name = task.rule.name if i == 0 else f"{task.rule.name}, by default"
                kept = {k: v for k, v in numbers.items() if k != "losses"}
                rows[name] = kept
    return found


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(own) for key, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(own) for own in value]
    if isinstance(value, float):
        return round(value, 5) if math.isfinite(value) else None
    return value
