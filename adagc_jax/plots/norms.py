"""Norm, reference and limit of single tensors over time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from adagc_jax.plots.canvas import (
    BLUE,
    GREY,
    ORANGE,
    RED,
    check_drawable,
    dots,
    heading,
    new_figure,
    percent,
    shortened,
    thinned_line,
    tidy,
)
from adagc_jax.replay.history import History
from adagc_jax.replay.tally import activity_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_gamma(
    history: History,
    tensors: Sequence[str] | None = None,
    *,
    limits: Any = None,
    title: str = "Gradient norm against the clipper's reference",
) -> "Figure":
    """Draws norms before and after clipping with the rule's reference.

    Args:
      history: Of a log, or ``replay(...).history``; scales and references are drawn
        where it has them.
      tensors: Which to draw; default: the four that lost most to the clipper, or
        whose norms varied most if there are no scales.
      limits: ``[time, tensors]``, norms from which on it clips: `thresholds` of the
        same tensors.
      title: Title of the picture.

    Returns:
      A matplotlib ``Figure`` with one panel per tensor.

    Raises:
      ImportError: without matplotlib.
      ValueError: for an unknown tensor, limits of another shape, or nothing to draw.

    Example:
      >>> import numpy as np
      >>> from adagc_jax.replay import History
      >>> steps, norm = np.arange(3), np.ones((3, 1), np.float32)
      >>> history = History(("w",), steps, steps, norm, norm[:, 0], reference=norm)
      >>> figure = plot_gamma(history, ["w"])
    """
    check_drawable("history", len(history.steps), len(history.names))
    names = list(tensors) if tensors is not None else most_changed(history)
    check_drawable("tensors", len(history.steps), len(names))
    columns = [history.index(name) for name in names]
    limits = None if limits is None else np.asarray(limits)
    if limits is not None and limits.shape != (len(history.steps), len(names)):
        raise ValueError(
            f"limits must have shape {(len(history.steps), len(names))}, one column "
            f"per tensor drawn, got {limits.shape}."
        )
    figure = new_figure(11, 1.0 + 1.9 * len(names))
    panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    for number, (axes, column) in enumerate(zip(panels, columns, strict=True)):
        limit = None if limits is None else limits[:, number]
        _draw(axes, history, column, limit)
    panels[-1].set_xlabel("step")
    handles = {
        text: line
        for axes in panels
        for line, text in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    legend = figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=9,
    )
    for line in legend.get_lines():
        line.set_linewidth(2.5)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    return figure


def most_changed(history: History, count: int = 4) -> list[str]:
    """Names of the tensors worth looking at first."""
    if history.scale is not None:
        weight = np.nansum(-np.log(np.maximum(history.scale, 1e-6)), axis=0)
    else:
        usable = (history.norm > 0) & np.isfinite(history.norm)
        norm = np.ma.masked_where(~usable, np.where(usable, history.norm, 1.0))
        weight = np.ma.filled(np.log(norm).std(axis=0), 0.0)
    return [history.names[i] for i in np.argsort(-weight, kind="stable")[:count]]


def _clipped(history: History, column: int) -> str:
    active, clipped = (part[:, column] for part in activity_of(history))
    share = clipped.sum() / active.sum() if active.any() else np.nan
    return f"clipped in {percent(share)} of its steps with a gradient"


def _draw(
    axes: "Axes", history: History, column: int, limit: np.ndarray | None
) -> None:
    steps = history.steps
    norm = np.where(history.norm[:, column] > 0, history.norm[:, column], np.nan)
    norm = np.where(np.isinf(norm), np.nan, norm).astype(np.float64)
    mark = dots(steps)
    line = thinned_line(steps, norm)
    axes.plot(*line, color=GREY, lw=0.8, label="norm before", **mark)
    name = shortened(history.names[column], 70)
    if history.scale is not None:
        scale = history.scale[:, column]
        after = np.where(scale > 0, norm * scale, np.nan)
        line = thinned_line(steps, after)
        axes.plot(*line, color=BLUE, lw=0.8, zorder=3, label="norm after", **mark)
        name += f" — {_clipped(history, column)}"
    if history.reference is not None:
        reference = history.reference[:, column].astype(np.float64)
        reference[reference <= 0] = np.nan
        line = thinned_line(steps, reference)
        axes.plot(*line, color=ORANGE, lw=2.4, label="reference", **mark)
    if limit is not None:
        # On top and dashed: a clipped norm lies on its limit, and both must show.
        line = thinned_line(steps, limit.astype(np.float64))
        style = {"lw": 1.6, "ls": (0, (3, 3)), "zorder": 4, "label": "limit"}
        axes.plot(*line, color=RED, **style, **mark)
    if np.isfinite(norm).any():
        axes.set_yscale("log")
    heading(axes, name)
    axes.set_ylabel("norm", fontsize=9)
    tidy(axes)
