"""Files of a replay: pictures, and one page of HTML that holds them all."""

import base64
import dataclasses
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from adagc_jax.replay.answers import Suggestion
from adagc_jax.replay.engine import Replayed
from adagc_jax.replay.history import History
from adagc_jax.replay.spikes import Episode
from adagc_jax.replay.tables import Table, as_html
from adagc_jax.replay.thresholds import thresholds
from adagc_jax.replay.whatif import WhatIf
from adagc_jax.spikes import OLMO_CORE, SpikeRule

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2em auto;
  padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { font-size: 1.1em; margin: 2em 0 .4em; }
table { border-collapse: collapse; font-size: 14px; display: block; overflow-x: auto; }
th, td { padding: .25em .9em; text-align: right; border-bottom: 1px solid #e5e5e5; }
th:first-child, td:first-child { text-align: left; }
th { background: #f5f5f5; } tr.marked td { font-weight: 600; background: #fff6de; }
img { max-width: 100%; } figure { margin: 1.6em 0; }
.note, figcaption { color: #666; margin: .2em 0; }
"""

_CAPTIONS = {
    "scales": "The factor on every gradient over time, and above it the share of "
    "tensors that are clipped.",
    "gamma": "Norms of the tensors that lose most, with the norm from which on each is "
    "clipped.",
    "clip_rates": "The tensors that are clipped most often, with their longest row of "
    "clipped updates.",
    "grid": "Every setting: what it holds of the spikes, and what it takes off all "
    "other norms.",
    "first_spike": "The first stretch of spikes from near: which tensors were first.",
    "largest_spike": "The stretch with the norm that is furthest out.",
    "loss": "The loss with its own spikes, and the stretches in which norms spiked.",
}


class Report(NamedTuple):
    """All that a replay came to.

    Attributes:
      source: Name of the log.
      history: What was read.
      replayed: The setting asked for.
      result: Counts of it, and of the grid.
      episodes: Spikes.
      lines: Sentences that say what was read and found.
      tables: For the page.
      suggestion: None without a grid.
    """

    source: str
    history: History
    replayed: Replayed
    result: WhatIf
    episodes: Sequence[Episode]
    lines: Sequence[str]
    tables: Sequence[Table]
    suggestion: Suggestion | None


def draw(report: Report) -> dict[str, Any]:
    """The pictures of a report by file name, without suffix."""
    from adagc_jax import plots
    from adagc_jax.plots.norms import most_changed

    replayed, variant = report.replayed, report.replayed.variant
    names = most_changed(replayed.history)
    pictures = {
        "scales": plots.plot_scales(
            replayed.history, title=f"What {variant} would have left of each gradient"
        ),
        "gamma": plots.plot_gamma(
            replayed.history,
            names,
            limits=thresholds(replayed, names),
            title=f"Norms against the reference of {variant}",
        ),
        "clip_rates": plots.plot_clip_rates(report.result),
    }
    if len(report.result.variants) > 1:
        pictures["grid"] = plots.plot_what_if(report.result, asked=0)
    for name, episode in notable(report.episodes).items():
        pictures[name] = plots.plot_episode(
            report.history, episode, measure=report.result.measure
        )
    history = report.history
    if history.loss is not None and np.isfinite(history.loss).any():
        pictures["loss"] = plots.plot_loss(
            history.loss,
            history.steps,
            rule=loss_rule(len(history.steps)),
            stretches=[history.steps[[e.first, e.last]] for e in report.episodes],
        )
    return pictures


def loss_rule(steps: int) -> SpikeRule:
    """OLMo-core's rule, with a window that is full early enough in a short run."""
    window = max(10, min(OLMO_CORE.window, steps // 6))
    return dataclasses.replace(OLMO_CORE, window=window, min_history=window // 2)


def notable(episodes: Sequence[Episode]) -> dict[str, Episode]:
    """The first episode, and the largest if that is another one."""
    if not episodes:
        return {}
    worst = max(episodes, key=lambda e: e.ratio)
    chosen = {"first_spike": episodes[0]}
    return chosen if worst is episodes[0] else chosen | {"largest_spike": worst}


def write(report: Report, folder: Path, *, page: bool) -> list[Path]:
    """Saves the pictures, or one page with all of them in it; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw(report)
    if page:
        path = folder / "report.html"
        path.write_text(as_page(report, pictures), encoding="utf-8")
        return [path]
    paths = []
    for name, figure in pictures.items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1])
    return paths


def as_page(report: Report, pictures: dict[str, Any]) -> str:
    """A page that needs nothing but itself."""
    title = html.escape(f"Replay of {report.source}")
    lines = "".join(f"<p>{html.escape(line)}</p>" for line in report.lines)
    notes = "".join(
        f'<p class="note">Note: {html.escape(note)}.</p>'
        for note in report.history.notes
    )
    images = "".join(
        f'<figure><img alt="{name}" src="data:image/png;base64,{_encoded(figure)}">'
        f"<figcaption>{html.escape(_CAPTIONS[name])}</figcaption></figure>"
        for name, figure in pictures.items()
    )
    tables = "".join(map(as_html, report.tables))
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}'
        f"</title><style>{_STYLE}</style></head><body><h1>{title}</h1>{lines}{notes}"
        f"{tables}{images}</body></html>"
    )


def _encoded(figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return base64.b64encode(buffer.getvalue()).decode("ascii")
