"""The picture: loss of every clipper, and how one clipper scaled each tensor."""

import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from _analysis import Run
from _config import Config

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart under every common colour blindness.
COLOURS = (
    "#7f7f7f",
    "#E69F00",
    "#0072B2",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#000000",
)
_KINDS = {
    "random": "random bytes",
    "xor": "xor-ed bytes",
    "labels": "shifted labels",
    "constant": "one byte repeated",
}


def _mark_bursts(axes: Axes, config: Config) -> None:
    for burst in config.bursts:
        end = burst.step + config.burst_length
        axes.axvspan(burst.step, end, color="0.85", lw=0, zorder=0)
        axes.annotate(
            f"{config.burst_length} batches:\n{_KINDS[burst.kind]}",
            (end, 0.98),
            xycoords=("data", "axes fraction"),
            xytext=(5, 0),
            textcoords="offset points",
            va="top",
            fontsize=10,
            color="0.3",
        )


def _losses(axes: Axes, runs: Sequence[Run]) -> None:
    top = 0.0
    for i, run in enumerate(runs):
        # The loss on a corrupted batch says nothing about the model: leave a gap.
        losses = np.where(run.clean, run.series("loss"), np.nan)
        val = run.validation_loss
        axes.plot(
            run.by_batch(losses),
            color=COLOURS[i % len(COLOURS)],
            ls="-" if i < len(COLOURS) else "--",
            lw=1.5,
            label=f"{run.name}: " + ("stopped" if val is None else f"{val:.3f}"),
        )
        settled = losses[len(losses) // 20 :]
        top = max(top, np.max(settled, initial=0.0, where=np.isfinite(settled)))
    if top:
        axes.set_ylim(top=top * 1.25)
    axes.set_ylabel("training loss (nats per byte)", fontsize=11)
    legend = axes.legend(
        title="validation loss at the end",
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        borderaxespad=0.2,
        ncols=4,
        frameon=False,
        fontsize=11,
        alignment="left",
    )
    for line in legend.get_lines():
        line.set_linewidth(4)
    axes.grid(axis="y", color="0.92")
    axes.spines[["top", "right"]].set_visible(False)


def _scales(figure: Figure, axes: Axes, run: Run, warmup: int) -> None:
    grid = run.by_batch(np.clip(np.nan_to_num(run.scales), 1e-3, 1.0))
    rows, batches = grid.shape
    mesh = axes.pcolormesh(
        np.arange(batches + 1),
        np.arange(rows + 1),
        grid,
        norm=LogNorm(min(np.nanmin(grid), 0.1), 1.0),
        cmap="cividis",
        rasterized=True,
    )
    labels = [re.sub("/(kernel|scale|embedding)$", "", name) for name in run.tensors]
    axes.set_yticks(np.arange(rows) + 0.5, labels, fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_title(
        f"{run.name}: the factor on each tensor's gradient (1 = left alone)",
        loc="left",
        fontsize=12,
    )
    if run.name.startswith("adagc") and 0 < warmup < len(run.rows):
        end = run.batches[warmup]
        axes.axvline(end, color="black", lw=1, ls="--")
        note = "warm-up:\nglobal norm"
        axes.text(end / 2, rows / 2, note, ha="center", va="center", fontsize=11)
    bar = figure.colorbar(mesh, ax=axes, pad=0.01, format="%g")
    bar.set_label("factor", fontsize=11)


def draw(runs: Sequence[Run], config: Config, path: Path) -> None:
    """Saves the picture; its heat map shows the last clipper that works per tensor."""
    detailed = [run for run in runs if run.is_local]
    figure, grid = plt.subplots(
        1 + bool(detailed),
        1,
        sharex=True,
        squeeze=False,
        figsize=(11, 8.5 if detailed else 4.5),
        layout="constrained",
    )
    axes = grid[:, 0]
    figure.suptitle(
        f"Bad batches hit a {config.layers}-layer byte-level Llama",
        x=0.01,
        ha="left",
        fontsize=14,
        fontweight="bold",
    )
    _losses(axes[0], runs)
    _mark_bursts(axes[0], config)
    if detailed:
        _scales(figure, axes[1], detailed[-1], config.clip_warmup_steps)
    # After a rollback, runs differ in the step that gets a batch, but not in the batch.
    axes[-1].set_xlabel("batch" if config.rollback else "step", fontsize=11)
    last = max(int(run.batches[-1]) for run in runs)
    axes[-1].set_xlim(0, max(config.steps, last + 1))
    figure.savefig(path, dpi=150)
    plt.close(figure)
