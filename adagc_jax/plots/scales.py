"""The heat map: what a clipper made of every tensor in every step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from adagc_jax.checks import check_choice
from adagc_jax.plots.canvas import (
    BLUE,
    bin_edges,
    cell_edges,
    check_drawable,
    heading,
    natural,
    new_figure,
    pooled,
    shortened,
    tidy,
)
from adagc_jax.replay.history import History
from adagc_jax.replay.tally import activity_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS, _LABELS, _FEWEST = 1200, 60, 5
_UNKNOWN, _DROPPED = "#c9d3e0", "#00a3a3"


def plot_scales(
    history: History,
    *,
    tensors: Sequence[str] | None = None,
    order: str = "name",
    floor: float = 1e-3,
    title: str = "What the clipper left of each gradient",
) -> "Figure":
    """Draws the scale of every tensor over time, and the share that was clipped.

    Steps are pooled by their smallest scale, so that a single clipped step of a long
    run stays visible. With many tensors, the rows carry the names of the modules.

    Args:
      history: With scales: of a log that has them, or ``replay(...).history``.
      tensors: Which to draw, in this order; default: all.
      order: ``"name"``, layers in the order of their numbers; ``"clipped"``, those that
        lost most first, at most 60 of them. Unused if ``tensors`` are given.
      floor: Smallest scale that has a colour of its own.
      title: Title of the picture.

    Returns:
      A matplotlib ``Figure``.

    Raises:
      ImportError: without matplotlib.
      ValueError: for a history without scales, an unknown tensor or order, or nothing
        to draw.

    Example:
      >>> import numpy as np
      >>> from adagc_jax.replay import History
      >>> steps, ones = np.arange(3), np.ones((3, 2), np.float32)
      >>> history = History(("a", "b"), steps, steps, ones, ones[:, 0], scale=ones / 2)
      >>> figure = plot_scales(history)
    """
    check_choice("order", order, ("name", "clipped"))
    if history.scale is None:
        raise ValueError(
            "history has no scales: log them (clip_metrics, level='all'), or pass "
            "replay(history, variant).history."
        )
    check_drawable("history", len(history.steps), len(history.names))
    names = list(tensors) if tensors is not None else _ordered(history, order)
    check_drawable("tensors", len(history.steps), len(names))
    columns = [history.index(name) for name in names]
    scale = history.scale[:, columns]
    tall = min(2.6 + 0.17 * len(names), 12.0)
    figure = new_figure(11, max(tall, 3.6))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, max(tall, 3)])
    edges = bin_edges(len(scale), _COLUMNS)
    active, clipped = (part[:, columns] for part in activity_of(history))
    _draw_share(above, history.steps, active, clipped, edges)
    _draw_map(figure, below, history.steps, scale, edges, floor)
    _label_rows(below, names)
    below.set_xlabel("step")
    if len(scale) > len(edges) - 1:
        each = len(scale) / (len(edges) - 1)
        heading(below, f"smallest factor in each {each:.0f} steps (white: untouched)")
    else:
        heading(below, "factor on the gradient (white: untouched)")
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    return figure


def _ordered(history: History, order: str) -> list[str]:
    if order == "name":
        return sorted(history.names, key=natural)
    assert history.scale is not None
    lost = np.nansum(1.0 - history.scale, axis=0)
    worst = np.argsort(-lost, kind="stable")[:_LABELS]
    return [history.names[i] for i in worst]


def _draw_share(
    axes: "Axes",
    steps: np.ndarray,
    active: np.ndarray,
    clipped: np.ndarray,
    edges: np.ndarray,
) -> None:
    counts, of = (pooled(part.sum(axis=1), edges, np.add) for part in (clipped, active))
    share = 100 * counts / np.maximum(of, 1)
    axes.fill_between(
        cell_edges(steps, edges),
        np.append(share, share[-1]),
        step="post",
        color=BLUE,
        alpha=0.75,
        lw=0,
    )
    axes.set_ylim(0, 100)
    axes.set_yticks([0, 50, 100])
    axes.set_ylabel("clipped\n(%)", fontsize=9)
    tidy(axes)


def _draw_map(
    figure: "Figure",
    axes: "Axes",
    steps: np.ndarray,
    scale: np.ndarray,
    edges: np.ndarray,
    floor: float,
) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Patch

    # The smallest scale of a stretch; fmin passes over the steps without one.
    least = pooled(scale, edges, np.fmin).T
    dropped, unknown = least == 0.0, np.isnan(least)
    shown = np.where(dropped | unknown, 1.0, np.maximum(least, floor))
    colours = _above_white(colormaps["magma"])
    colours = colours.with_extremes(bad=_UNKNOWN, under=_DROPPED)
    # Below the smallest scale: rounding must not carry it into the colour of zero.
    low = 0.999 * min(float(shown.min()), 0.1)
    grid = np.ma.masked_where(unknown, np.where(dropped, low / 2, shown))
    x, y = cell_edges(steps, edges), np.arange(least.shape[0] + 1)
    mesh = axes.pcolormesh(
        x, y, grid, norm=LogNorm(low, 1.0), cmap=colours, rasterized=True
    )
    axes.invert_yaxis()
    bar = figure.colorbar(mesh, ax=axes, pad=0.01, format="%g", aspect=30)
    bar.set_label("factor", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    kinds = (
        (dropped, _DROPPED, "dropped: not finite"),
        (unknown, _UNKNOWN, "not logged"),
    )
    patches = [Patch(color=c, label=text) for which, c, text in kinds if which.any()]
    if patches:
        axes.legend(
            handles=patches,
            loc="lower right",
            bbox_to_anchor=(1.0, 1.0),
            ncols=2,
            frameon=False,
            fontsize=9,
            borderaxespad=0.1,
        )


def _above_white(colours: Any) -> Any:
    """The map, but with white at its top: a scale of exactly one."""
    from matplotlib.colors import ListedColormap

    table = colours(np.linspace(0.0, 0.93, 256))
    fade = np.linspace(0, 1, 40)[:, None]
    table[-40:] = (1 - fade) * table[-40:] + fade * np.ones(4)
    return ListedColormap(table)


def _label_rows(axes: "Axes", names: Sequence[str]) -> None:
    """A name for each row, or for each module where rows are too many."""
    axes.tick_params(axis="both", labelsize=9)
    axes.tick_params(axis="y", length=0, labelsize=8)
    if len(names) <= _LABELS:
        places = np.arange(len(names)) + 0.5
        axes.set_yticks(places, [shortened(name) for name in names])
        return
    groups = _modules(names)
    centres = [(start + end) / 2 for _, start, end in groups]
    # A module of one or two rows has no room for a name of its own.
    room = len(names) / _LABELS
    labelled, last = [], -room
    for place, (name, _, _) in zip(centres, groups, strict=True):
        if place - last >= room:
            labelled.append((place, shortened(name)))
            last = place
    axes.set_yticks(*map(list, zip(*labelled, strict=True)))
    for _, start, _ in groups[1:] if len(groups) <= _LABELS else ():
        axes.axhline(start, color="0.75", lw=0.4)


def _modules(names: Sequence[str]) -> list[tuple[str, int, int]]:
    """Runs of names with the same start: the longest starts that make few runs.

    Where few runs would be hardly any, as with all layers in one list, they are many.
    """
    best: list[tuple[str, int, int]] = []
    for depth in range(1, 1 + max(name.count("/") for name in names) + 1):
        runs: list[tuple[str, int, int]] = []
        for row, name in enumerate(names):
            start = "/".join(name.split("/")[:depth])
            if runs and runs[-1][0] == start:
                runs[-1] = (start, runs[-1][1], row + 1)
            else:
                runs.append((start, row, row + 1))
        if len(best) >= _FEWEST and len(runs) > _LABELS:
            break
        best = runs
    return best
