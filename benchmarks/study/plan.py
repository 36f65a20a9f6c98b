"""Who trains on what: the tasks of each phase, and the choice between them."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import ablations
import numpy as np
from cells import Task, load
from rules import GRID, RULES, Rule
from scenarios import REPORT, STEPS, TUNING, VARIED, Scenario
from setups import MAIN, VARIANTS, Setup

PHASES = ("rates", "tuning", "report", "variants", "grid", "ablations")
# Of a setup's peak learning rate: what was to choose from.
RATES = (0.5, 1.0, 2.0)
# What competes under other models and optimizers.
FINALISTS = ("none", "global_gc", "tensor_gc", "adagc", "adagc, ema", "robust_gc")
# Whose defaults are reported beside what was chosen.
BY_DEFAULT = ("global_gc", "adagc", "robust_gc")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is trained."""

    tuning: tuple[Scenario, ...] = TUNING
    report: tuple[Scenario, ...] = REPORT
    varied: tuple[Scenario, ...] = VARIED
    variants: tuple[Setup, ...] = VARIANTS
    rules: tuple[Rule, ...] = RULES
    grid: Rule | None = GRID
    ablations: tuple[Rule, ...] = ablations.ABLATIONS
    rates: tuple[Setup, ...] = (MAIN, *VARIANTS)
    tuning_seeds: tuple[int, ...] = (100, 101, 102)
    report_seeds: tuple[int, ...] = tuple(range(6))
    variant_seeds: tuple[int, ...] = tuple(range(5))
    steps: int = STEPS


FULL = Sizes()
REDUCED = Sizes(
    tuning=TUNING[:2],
    report=REPORT[2:4],
    varied=REPORT[2:3],
    variants=VARIANTS[-3:-2],
    rules=tuple(r for r in RULES if r.name in ("none", "adagc", "robust_gc")),
    grid=None,
    ablations=ablations.ABLATIONS[-1:],
    rates=(),
    tuning_seeds=(100, 101),
    report_seeds=(0, 1),
    variant_seeds=(0, 1),
)


def tasks(phase: str, sizes: Sizes, folder: Path) -> list[Task]:
    """Of one phase; "report" and "variants" need "tuning" done."""
    rules = sizes.rules
    if phase == "rates":
        return [task for setup in sizes.rates for task in rate_tasks(setup, sizes)]
    if phase == "tuning":
        return [tuning_task(rule, sizes) for rule in rules]
    if phase == "grid":
        return [grid_task(sizes.grid, sizes)] if sizes.grid else []
    if phase == "ablations":
        return [ablation_task(rule, sizes) for rule in sizes.ablations]
    if phase == "report":
        return [report_task(rule, sizes, folder) for rule in rules]
    return [
        variant_task(setup, rule, sizes, folder)
        for setup in sizes.variants
        for rule in rules
        if rule.name in FINALISTS
    ]


def rate_tasks(setup: Setup, sizes: Sizes) -> list[Task]:
    """Without clipping, where nothing happens, at each peak learning rate."""
    none = next(rule for rule in sizes.rules if rule.name == "none")
    peaks = [factor * setup.peak_lr for factor in RATES]
    setups = [
        dataclasses.replace(setup, name=f"{setup.name}, peak {peak:g}", peak_lr=peak)
        for peak in peaks
    ]
    clean, seeds = sizes.tuning[:1], sizes.tuning_seeds
    return [
        Task("rates", own, none, none.settings, clean, seeds, sizes.steps)
        for own in setups
    ]


def ablation_task(rule: Rule, sizes: Sizes) -> Task:
    seeds, scenarios = sizes.variant_seeds, ablations.SCENARIOS
    return Task("ablations", MAIN, rule, rule.settings, scenarios, seeds, sizes.steps)


def tuning_task(rule: Rule, sizes: Sizes) -> Task:
    seeds = sizes.tuning_seeds
    return Task("tuning", MAIN, rule, rule.settings, sizes.tuning, seeds, sizes.steps)


def grid_task(grid: Rule, sizes: Sizes) -> Task:
    return dataclasses.replace(tuning_task(grid, sizes), phase="grid")


def report_task(rule: Rule, sizes: Sizes, folder: Path) -> Task:
    """The chosen setting, then the defaults where they are reported as well."""
    chosen = chosen_setting(rule, sizes, folder)
    settings = [chosen]
    if rule.name in BY_DEFAULT and chosen != rule.settings[0]:
        settings.append(rule.settings[0])
    seeds = sizes.report_seeds
    return Task("report", MAIN, rule, tuple(settings), sizes.report, seeds, sizes.steps)


def variant_task(setup: Setup, rule: Rule, sizes: Sizes, folder: Path) -> Task:
    settings = (chosen_setting(rule, sizes, folder),)
    seeds = sizes.variant_seeds
    return Task("variants", setup, rule, settings, sizes.varied, seeds, sizes.steps)


def chosen_setting(rule: Rule, sizes: Sizes, folder: Path) -> tuple[float, ...]:
    """The setting with the lowest `scores`."""
    return rule.settings[int(np.argmin(scores(tuning_task(rule, sizes), folder)))]


def scores(task: Task, folder: Path) -> Sequence[float]:
    """Mean over scenarios of the median validation loss over seeds, by setting.

    Raises:
      ValueError: If a cell is missing.
    """
    medians = []
    for scenario in task.scenarios:
        cell = load(task, folder, scenario)
        if cell is None:
            raise ValueError(
                f"{task.file(folder, scenario)} is missing: train it first"
            )
        medians.append([float(np.median(runs["validation"])) for runs in cell])
    return np.mean(medians, axis=0).tolist()
