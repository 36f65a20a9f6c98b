"""Settings against each other, and tensors against each other."""

from typing import TYPE_CHECKING

import numpy as np

from adagc_jax.plots.canvas import (
    BLUE,
    GREY,
    ORANGE,
    heading,
    new_figure,
    percent,
    shortened,
    tidy,
)
from adagc_jax.replay.answers import ranking, suggest
from adagc_jax.replay.variants import labels
from adagc_jax.replay.whatif import WhatIf
from adagc_jax.replay.words import number_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_what_if(
    result: WhatIf,
    *,
    rows: int = 40,
    asked: int | None = None,
    title: str = "What would it have done?",
) -> "Figure":
    """Draws for every setting what it holds of the spikes and costs without them.

    Args:
      result: Of `what_if`.
      rows: How many settings, the best first.
      asked: Index of the setting that was asked for: marked, and always drawn.
      title: Title of the picture.

    Returns:
      A matplotlib ``Figure``; the suggested setting stands out.

    Raises:
      ImportError: without matplotlib.

    Example:
      >>> import numpy as np
      >>> from adagc_jax.replay import History, make_grid, make_variant, what_if
      >>> steps, norm = np.arange(300), np.ones((300, 1), np.float32)
      >>> history = History(("w",), steps, steps, norm, norm[:, 0])
      >>> figure = plot_what_if(what_if(history, make_grid(make_variant("tensor_gc"))))
    """
    order = ranking(result)
    kept = order[:rows]
    order = kept if asked is None or asked in kept else [*kept[:-1], asked]
    shared, every = labels(result.variants)
    names = [shortened(every[i], 70) for i in order]
    names = [
        f"{'(asked for) ' * (i == asked)}{name}"
        for i, name in zip(order, names, strict=True)
    ]
    best = suggest(result).variant
    chosen = [i for i, v in enumerate(order) if result.variants[v] == best]
    figure = new_figure(11, 1.6 + 0.24 * len(order))
    panels = figure.subplots(1, 3, sharey=True)
    values = (
        ("spikes held (%)", 100 * result.held[order], BLUE),
        ("off ordinary norms (%)", 100 * result.ordinary_loss[order], ORANGE),
        ("clipped (%)", 100 * result.clip_rate[order], GREY),
    )
    for axes, (text, shares, colour) in zip(panels, values, strict=True):
        _draw_bars(axes, shares, colour, chosen)
        heading(axes, text)
    panels[0].set_xlim(0, 100)
    for place in np.flatnonzero(~result.scored[order]):
        panels[0].text(1, place, "too short to score", va="center", fontsize=8)
    panels[0].set_yticks(np.arange(len(order)), names, fontsize=8)
    panels[0].set_ylim(len(order) - 0.4, -0.6)
    for label in (panels[0].get_yticklabels()[i] for i in chosen):
        label.set_fontweight("bold")
    title += f"  ({shared})" if shared else ""
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    return figure


def plot_clip_rates(
    result: WhatIf, variant: int = 0, *, rows: int = 30, title: str | None = None
) -> "Figure":
    """Draws the tensors that one setting clips most.

    Args:
      result: Of `what_if`.
      variant: Which of its settings.
      rows: How many tensors, the most clipped first.
      title: Title of the picture; default: the setting.

    Returns:
      A matplotlib ``Figure``.

    Raises:
      ImportError: without matplotlib.

    Example:
      >>> import numpy as np
      >>> from adagc_jax.replay import History, make_variant, what_if
      >>> steps, norm = np.arange(300), np.ones((300, 1), np.float32)
      >>> history = History(("w",), steps, steps, norm, norm[:, 0])
      >>> figure = plot_clip_rates(what_if(history, [make_variant("tensor_gc")]))
    """
    tally = result.tally
    active = np.maximum(tally.active[variant], 1)
    rates = 100 * tally.clipped[variant] / active
    order = np.argsort(-rates, kind="stable")[:rows]
    figure = new_figure(10, 1.5 + 0.22 * len(order))
    axes = figure.subplots()
    _draw_bars(axes, rates[order], BLUE, [])
    for place, tensor in enumerate(order):
        spikes = int(tally.spikes[variant][tensor])
        longest = int(tally.longest[variant][tensor])
        note = f"up to {longest} in a row"
        note += f", {number_of(spikes, 'spike')}" if spikes else ""
        # Beside the axis, which ends at 100 %.
        where = {"transform": axes.get_yaxis_transform(), "va": "center"}
        axes.text(1.01, place, note, fontsize=8, color="0.35", **where)
    names = [shortened(result.names[i], 50) for i in order]
    axes.set_yticks(np.arange(len(order)), names, fontsize=8)
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.set_xlim(0, min(max(float(rates.max(initial=0.0)) * 1.1, 1.0), 100.0))
    total = percent(result.clip_rate[variant])
    heading(axes, f"steps in which a tensor is clipped (%); all together {total}")
    figure.suptitle(
        title or str(result.variants[variant]),
        x=0.01,
        ha="left",
        fontsize=13,
        fontweight="bold",
    )
    return figure


def _draw_bars(
    axes: "Axes", shares: np.ndarray, colour: str, chosen: list[int]
) -> None:
    places = np.arange(len(shares))
    bars = axes.barh(
        places, np.nan_to_num(shares), height=0.7, color=colour, alpha=0.55
    )
    for place in chosen:
        bars[place].set_alpha(1.0)
        axes.axhspan(place - 0.5, place + 0.5, color="0.93", zorder=0)
    tidy(axes, grid="x")
    axes.tick_params(axis="y", length=0)
