"""Two pictures: the loss around bursts, and the differences paired by seed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import plan
from cells import load

matplotlib.use("Agg")
from _plot import COLOURS
from matplotlib import pyplot as plt
from scenarios import Scenario
from seeds import median_with_interval, paired

_DRAWN = ("none", "global_gc", "zclip", "adagc", "robust_gc")
_AGAINST = ("global_gc", "adagc")


def draw(
    report: dict[str, Any], sizes: plan.Sizes, folder: Path, out: Path
) -> Iterator[Path]:
    """Draws both; yields their files."""
    yield _losses(sizes, folder, out / "study_losses.png")
    yield _differences(report, out / "study_differences.png")


def _losses(sizes: plan.Sizes, folder: Path, file: Path) -> Path:
    """Median loss over seeds in the scenarios of growing length."""
    lengths = [s for s in sizes.report if s.events and not s.noisy]
    shown = sorted(lengths, key=lambda s: s.events[0].length)
    shown = [shown[i] for i in np.linspace(0, len(shown) - 1, 4).round().astype(int)]
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), sharex=True, sharey=True)
    for panel, scenario in zip(axes.flat, shown, strict=True):
        clean = [scenario.kind(step) == "clean" for step in range(sizes.steps)]
        for colour, rule in zip(COLOURS, _rules(sizes), strict=False):
            cell = load(plan.report_task(rule, sizes, folder), folder, scenario)
            if cell:
                median = np.median(cell[0]["losses"], axis=0)
                label = rule.name
                # The loss of a corrupted batch says nothing about the model.
                panel.plot(np.where(clean, median, np.nan), color=colour, label=label)
        _mark(panel, scenario)
    axes[0, 0].legend(frameon=False)
    axes[0, 0].set_ylim(2, 5)
    figure.supxlabel("step")
    figure.supylabel("training loss, nats per byte, median over seeds")
    return _save(figure, file)


def _mark(panel: Any, scenario: Scenario) -> None:
    panel.set_title(scenario.name, fontsize=10)
    for event in scenario.events:
        panel.axvspan(event.step, event.step + event.length, color="0.85", lw=0)


def _differences(report: dict[str, Any], file: Path) -> Path:
    """robust_gc's validation loss minus that of others, scenario by scenario."""
    names = list(report["report"])
    figure, axes = plt.subplots(figsize=(9, 0.45 * len(names) + 1.6))
    for shift, (colour, other) in enumerate(zip(COLOURS[1:], _AGAINST, strict=False)):
        for place, name in enumerate(names):
            rows = report["report"][name]
            if other not in rows or "robust_gc" not in rows:
                continue
            middle, low, high = median_with_interval(
                paired(rows["robust_gc"], rows[other], "validation")
            )
            axes.errorbar(
                middle,
                place + 0.25 * (shift - 0.5),
                xerr=[[middle - low], [high - middle]],
                fmt="o",
                color=colour,
                label=f"robust_gc minus {other}" if place == 0 else None,
            )
    axes.axvline(0, color="0.5", lw=1)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("difference in validation loss, nats per byte (left is better)")
    figure.legend(frameon=False, loc="upper right", ncols=2)
    return _save(figure, file, top=0.94)


def _rules(sizes: plan.Sizes) -> list[Any]:
    return [rule for rule in sizes.rules if rule.name in _DRAWN]


def _save(figure: Any, file: Path, top: float = 1.0) -> Path:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(rect=(0, 0, 1, top))
    figure.savefig(file, dpi=110)
    plt.close(figure)
    return file
