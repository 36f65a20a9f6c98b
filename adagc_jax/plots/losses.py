"""The loss with its spikes marked."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from adagc_jax.plots.canvas import (
    COLOURS,
    ORANGE,
    dots,
    new_figure,
    thinned_line,
    tidy,
)
from adagc_jax.replay.words import number_of
from adagc_jax.spikes import ADAGC, SpikeRule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_loss(
    losses: Any,
    steps: Any = None,
    *,
    rule: SpikeRule = ADAGC,
    stretches: Sequence[Any] = (),
    title: str = "Training loss",
) -> "Figure":
    """Draws one loss or several, and marks what `spike_score` counts as spikes.

    Long series are thinned out to their largest and smallest values per stretch, so no
    spike is lost. The loss axis leaves the first tenth of the steps out of its range,
    and is logarithmic where one loss is more than 20 times the median.

    Args:
      losses: ``[steps]`` numbers, or a mapping from names to such series.
      steps: ``[steps]`` ints for the axis; default: 0, 1, 2, ...
      rule: The definition of a spike; its window must fit into the run. Steps before
        any series can be scored are shaded.
      stretches: Pairs of first and last step to mark, such as those of
        `find_episodes`, in which norms spiked.
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
      'loss: 1 spike, score 0.05 %, largest z 139'
    """
    series = losses if isinstance(losses, Mapping) else {"loss": losses}
    figure = new_figure(10, 4.2)
    axes = figure.subplots()
    checked = {name: _checked(name, v, steps) for name, v in series.items()}
    for number, (name, pair) in enumerate(checked.items()):
        _draw(axes, name, pair, rule, COLOURS[number % 8])
    _shade(axes, list(checked.values()), rule, stretches)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    tidy(axes)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    sides = "±" if rule.direction == "both" else "+"
    before = f"{rule.history} to {rule.window}" if rule.min_history else rule.window
    legend = axes.legend(
        title=f"spike: {sides}{rule.n_sigma:g} sigma off {before} steps before it",
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        borderaxespad=0.2,
        ncols=4,
        frameon=False,
        fontsize=9,
        title_fontsize=9,
        alignment="left",
    )
    for line in legend.get_lines():
        line.set_linewidth(3)
    _set_range(axes, [values for _, values in checked.values()])
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


def _shade(
    axes: "Axes",
    series: Sequence[tuple[np.ndarray, np.ndarray]],
    rule: SpikeRule,
    stretches: Sequence[Any],
) -> None:
    """The start that no spike can be found in, and what is to be marked."""
    starts = [steps[0] for steps, _ in series]
    ends = [_first_scored(*pair, rule) for pair in series]
    if min(starts) < min(ends):
        label = "not scored"
        axes.axvspan(min(starts), min(ends), color="0.9", lw=0, zorder=0, label=label)
    for number, (first, last) in enumerate(stretches):
        label = "norms spike" if not number else None
        style = {"color": ORANGE, "alpha": 0.3, "zorder": 0.5, "label": label}
        axes.axvspan(first - 0.5, last + 0.5, lw=0.8, **style)


def _first_scored(steps: np.ndarray, values: np.ndarray, rule: SpikeRule) -> Any:
    """The first step with enough history; that of a value not finite is no matter."""
    known = np.isfinite(values)
    scored = rule.flags(values).scored & known
    return steps[scored.argmax()] if scored.any() else steps[-1]


def _draw(
    axes: "Axes",
    name: str,
    series: tuple[np.ndarray, np.ndarray],
    rule: SpikeRule,
    colour: str,
) -> None:
    steps, values = series
    score, indices, z = rule.score(values)
    name = name.replace("$", r"\$")
    if np.isnan(score):
        label = f"{name}: too short for this window"
    else:
        label = f"{name}: {number_of(len(indices), 'spike')}, score {score:.3g} %"
        z = z[np.isfinite(z)]
        z = np.abs(z) if rule.direction == "both" else z
        label += f", largest z {z.max(initial=0.0):.3g}"
    line = thinned_line(steps, values)
    axes.plot(*line, color=colour, lw=1.1, label=label, **dots(steps))
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
