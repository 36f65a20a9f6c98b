"""The loss with its spikes marked."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from adagc_jax.plots.canvas import COLOURS, new_figure, thinned_line, tidy
from adagc_jax.spikes import ADAGC, SpikeRule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_loss(
    losses: Any,
    steps: Any = None,
    *,
    rule: SpikeRule = ADAGC,
    title: str = "Training loss",
) -> "Figure":
    """Draws one loss or several, and marks what `spike_score` counts as spikes.

    Long series are thinned out to their largest and smallest values per stretch, so no
    spike is lost. The loss axis leaves the first tenth of the steps out of its range,
    and is logarithmic where one loss is more than 20 times the median.

    Args:
      losses: ``[steps]`` numbers, or a mapping from names to such series.
      steps: ``[steps]`` ints for the axis; default: 0, 1, 2, ...
      rule: The definition of a spike; its window must fit into the run.
      title: Title of the picture.

    Returns:
      A matplotlib ``Figure``.

    Raises:
      ImportError: without matplotlib.
      ValueError: if a series has no values, or another length than ``steps``.

    Example:
      >>> import numpy as np
      >>> losses = np.where(np.arange(2_000) % 2, 2.0, 2.1)
      >>> losses[1_500] = 9.0
      >>> figure = plot_loss(losses)
      >>> figure.axes[0].get_legend().get_texts()[0].get_text()
      'loss: 1 spike, score 0.05 %'
    """
    series = losses if isinstance(losses, Mapping) else {"loss": losses}
    figure = new_figure(10, 4.2)
    axes = figure.subplots()
    for number, (name, values) in enumerate(series.items()):
        _draw(axes, name, _checked(name, values, steps), rule, COLOURS[number % 8])
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    tidy(axes)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    sides = "±" if rule.direction == "both" else "+"
    legend = axes.legend(
        title=f"spike: {sides}{rule.n_sigma:g} sigma off {rule.window} steps before it",
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        borderaxespad=0.2,
        ncols=3,
        frameon=False,
        fontsize=9,
        title_fontsize=9,
        alignment="left",
    )
    for line in legend.get_lines():
        line.set_linewidth(3)
    _set_range(axes, list(series.values()))
    return figure


def _checked(name: str, values: Any, steps: Any) -> tuple[np.ndarray, np.ndarray]:
    values = np.asarray(values, np.float64)
    steps = np.arange(len(values)) if steps is None else np.asarray(steps)
    if not len(values) or values.shape != steps.shape:
        raise ValueError(
            f"losses {name!r} must be a series as long as steps, got shape "
            f"{values.shape} and {steps.shape}."
        )
    return steps, values


def _draw(
    axes: "Axes",
    name: str,
    series: tuple[np.ndarray, np.ndarray],
    rule: SpikeRule,
    colour: str,
) -> None:
    steps, values = series
    score, indices, _ = rule.score(values)
    if np.isnan(score):
        label = f"{name}: too short for this window"
    else:
        count = f"{len(indices)} spike" + ("s" if len(indices) != 1 else "")
        label = f"{name}: {count}, score {score:.3g} %"
    axes.plot(*thinned_line(steps, values), color=colour, lw=1.1, label=label)
    drawn = indices[np.isfinite(values[indices])]
    axes.plot(
        steps[drawn],
        values[drawn],
        ls="",
        marker="v",
        ms=6,
        mfc="none",
        mec=colour,
        mew=1.4,
        clip_on=False,
    )
    for step in steps[indices[~np.isfinite(values[indices])]]:
        axes.axvline(step, color=colour, lw=1, ls=":")


def _set_range(axes: "Axes", series: Sequence[Any]) -> None:
    """The start of a run would squeeze all the rest of it to a line."""
    settled = [np.asarray(v, np.float64)[len(v) // 10 :] for v in series]
    values = np.concatenate(settled)
    values = values[np.isfinite(values)]
    if not len(values):
        return
    low, high = values.min(), values.max()
    if low > 0 and high > 20 * np.median(values):
        axes.set_yscale("log")
        axes.set_ylim(low / 1.3, high * 1.3)
    else:
        room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        axes.set_ylim(low - room, high + room)
