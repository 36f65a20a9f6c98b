"""One spike from near: which tensor was first."""

from typing import TYPE_CHECKING

import numpy as np

from adagc_jax.plots.canvas import BLUE, heading, new_figure, shortened, tidy
from adagc_jax.replay.history import History
from adagc_jax.replay.spikes import Episode, SpikeMeasure, levels_of, spike_levels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_episode(
    history: History,
    episode: Episode,
    *,
    measure: SpikeMeasure | None = None,
    rows: int = 25,
    before: int = 12,
    after: int = 24,
) -> "Figure":
    """Draws the norms around a spike, each in units of its tensor's level.

    Args:
      history: Of a log; its loss is drawn as well if it has one.
      episode: One of `find_episodes` of the same history.
      measure: The measure that it was found with.
      rows: How many tensors: those that spiked first, then the largest.
      before: Updates before the first spike.
      after: Updates after it.

    Returns:
      A matplotlib ``Figure``.

    Raises:
      ImportError: without matplotlib.

    Example:
      >>> import numpy as np
      >>> from adagc_jax.replay import History, find_episodes
      >>> steps, norm = np.arange(300), np.ones((300, 2), np.float32)
      >>> norm[200, 1] = 8.0
      >>> history = History(("a", "b"), steps, steps, norm, norm[:, 0])
      >>> figure = plot_episode(history, find_episodes(history)[0])
    """
    measure = measure or SpikeMeasure()
    start = max(episode.first - before, 0)
    end = min(episode.first + after, len(history.steps))
    levels = spike_levels(history, measure)
    ratio = history.norm[start:end] / levels_of(levels, measure, slice(start, end))
    ratio = np.where(np.isfinite(ratio) & (ratio > 0), ratio, np.nan)
    chosen = _first_to_spike(ratio, measure)[:rows]
    figure = new_figure(10, 1.8 + 0.24 * len(chosen) + 1.3 * (history.loss is not None))
    heights = [1.3, 0.24 * len(chosen) + 0.6] if history.loss is not None else [1]
    panels = figure.subplots(
        len(heights), 1, sharex=True, height_ratios=heights, squeeze=False
    )[:, 0]
    steps = history.steps[start:end]
    if history.loss is not None:
        panels[0].plot(steps, history.loss[start:end], color=BLUE, lw=1.6, marker=".")
        panels[0].set_ylabel("loss", fontsize=9)
        tidy(panels[0])
    names = [shortened(history.names[i]) for i in chosen]
    _draw(figure, panels[-1], steps, ratio[:, chosen].T, names)
    panels[-1].axvline(history.steps[episode.first] - 0.5, color="black", lw=1, ls="--")
    leader, more = episode.leaders[0], len(episode.leaders) - 1
    figure.suptitle(
        f"Step {history.steps[episode.first]}: {shortened(leader, 50)} spikes first"
        + (f", with {more} more" if more else ""),
        x=0.01,
        ha="left",
        fontsize=13,
        fontweight="bold",
    )
    return figure


def _first_to_spike(ratio: np.ndarray, measure: SpikeMeasure) -> list[int]:
    """Tensors by their first spike, then by how far out they were at that time."""
    is_spike = np.nan_to_num(ratio) > measure.ratio
    first = np.where(is_spike.any(axis=0), is_spike.argmax(axis=0), len(ratio))
    at_first = np.take_along_axis(
        np.nan_to_num(ratio), np.minimum(first, len(ratio) - 1)[None], axis=0
    )[0]
    return [int(i) for i in np.lexsort((-at_first, first))]


def _draw(
    figure: "Figure",
    axes: "Axes",
    steps: np.ndarray,
    ratio: np.ndarray,
    names: list[str],
) -> None:
    from matplotlib.colors import LogNorm

    high = max(float(np.nanmax(ratio, initial=0.0)), 4.0)
    mesh = axes.pcolormesh(
        np.append(steps, steps[-1] + 1) - 0.5,
        np.arange(len(names) + 1),
        np.ma.masked_invalid(ratio),
        norm=LogNorm(1.0, high),
        cmap="YlOrRd",
        rasterized=True,
    )
    axes.set_yticks(np.arange(len(names)) + 0.5, names)
    axes.tick_params(labelsize=9)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlabel("step")
    heading(axes, "norm in units of the tensor's own level")
    bar = figure.colorbar(mesh, ax=axes, pad=0.01, format="%g x", aspect=25)
    bar.ax.tick_params(labelsize=8)
