"""One spike from near: which tensor was first."""

from typing import TYPE_CHECKING

import numpy as np

from adagc_jax.plots.canvas import BLUE, heading, new_figure, shortened, tidy
from adagc_jax.replay.history import History
from adagc_jax.replay.spikes import Episode, SpikeMeasure, levels_of, spike_levels
from adagc_jax.replay.words import number_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NOT_FINITE = "#00a3a3"


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
      rows: How many tensors: those that spiked first, then the largest. A norm that is
        not finite is larger than any.
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
    norm = history.norm[start:end]
    finite = np.isfinite(norm)
    level = levels_of(levels, measure, slice(start, end))
    ratio = np.where(finite, np.where(finite, norm, 0.0) / level, np.inf)
    chosen = _first_to_spike(ratio[episode.first - start :], measure)[:rows]
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
    figure.suptitle(
        f"Step {history.steps[episode.first]}: {_who(history, episode)}",
        x=0.01,
        ha="left",
        fontsize=13,
        fontweight="bold",
    )
    return figure


def _who(history: History, episode: Episode) -> str:
    """Of tensors that spike in the same step, the log cannot tell which was first."""
    leader, count = episode.leaders[0], len(episode.leaders)
    value = history.norm[episode.first, history.index(leader)]
    name = shortened(leader, 50)
    if not np.isfinite(value):
        others = f", and {number_of(count - 1, 'tensor')} more" if count > 1 else ""
        return f"{name} is {value}{others}"
    if count == 1:
        return f"{name} spikes first"
    return f"{count} tensors spike first, {name} furthest out"


def _first_to_spike(ratio: np.ndarray, measure: SpikeMeasure) -> list[int]:
    """Tensors by their first spike, then by how far out they were at that time.

    Those that do not spike come last, by how far out they ever were.
    """
    is_spike = ratio > measure.ratio
    spikes = is_spike.any(axis=0)
    first = np.where(spikes, is_spike.argmax(axis=0), len(ratio))
    row = np.minimum(first, len(ratio) - 1)
    at_first = np.take_along_axis(ratio, row[None], axis=0)[0]
    size = np.where(spikes, at_first, ratio.max(axis=0))
    return [int(i) for i in np.lexsort((-size, first))]


def _draw(
    figure: "Figure",
    axes: "Axes",
    steps: np.ndarray,
    ratio: np.ndarray,
    names: list[str],
) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm

    finite = np.isfinite(ratio)
    high = max(float(ratio[finite].max(initial=0.0)), 4.0)
    # A logarithm may round the largest ratio to beyond the scale's end.
    shown = np.where(finite, np.minimum(ratio, high * (1.0 - 1e-6)), 2 * high)
    mesh = axes.pcolormesh(
        np.append(steps, steps[-1] + 1) - 0.5,
        np.arange(len(names) + 1),
        np.ma.masked_where(shown <= 0, shown),
        norm=LogNorm(1.0, high),
        cmap=colormaps["YlOrRd"].with_extremes(over=_NOT_FINITE),
        rasterized=True,
    )
    axes.set_yticks(np.arange(len(names)) + 0.5, names)
    axes.tick_params(labelsize=9)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlabel("step")
    teal = "" if finite.all() else " (teal: not finite)"
    heading(axes, f"norm in units of the tensor's own level{teal}")
    bar = figure.colorbar(mesh, ax=axes, pad=0.01, aspect=25)
    bar.ax.minorticks_off()
    ticks = _ticks(high)
    bar.set_ticks(ticks, labels=[f"{tick:g} x" for tick in ticks])
    bar.ax.tick_params(labelsize=8)


def _ticks(high: float) -> list[float]:
    """1, 2, 5, 10, ... as far as the colours go, and not too many of them."""
    steps = (1, 2, 5) if high < 200 else (1,)
    ticks = [m * 10.0**e for e in range(10) for m in steps if m * 10.0**e <= high]
    return ticks[:: 1 + len(ticks) // 9]
