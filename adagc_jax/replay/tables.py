"""The answers as tables of text: for a terminal, plain or rich, and for HTML."""

import html
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from adagc_jax.replay.answers import ranking
from adagc_jax.replay.history import History
from adagc_jax.replay.spikes import Episode
from adagc_jax.replay.variants import labels
from adagc_jax.replay.whatif import WhatIf


class Table(NamedTuple):
    """A title, names of columns (numbers stand at the right), and rows of text."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    marked: int | None = None


def tensor_table(result: WhatIf, variant: int = 0, rows: int = 10) -> Table:
    """The tensors that a setting clips most."""
    tally = result.tally
    rate = tally.clipped[variant] / np.maximum(tally.active[variant], 1)
    order = np.argsort(-rate, kind="stable")[:rows]
    return Table(
        f"Most clipped tensors under {result.variants[variant]}",
        ("tensor", "clip rate", "longest row", "smallest factor", "spikes", "held"),
        [
            (
                result.names[i],
                share(rate[i]),
                str(tally.longest[variant][i]),
                f"{tally.min_scale[variant][i]:.3g}",
                str(tally.spikes[variant][i]),
                str(tally.held[variant][i]),
            )
            for i in order
        ],
    )


def episode_table(
    history: History, episodes: Sequence[Episode], rows: int = 10
) -> Table:
    """The largest stretches of spikes, in the order of time."""
    largest = sorted(episodes, key=lambda e: -e.ratio)[:rows]
    shown = sorted(largest, key=lambda e: e.first)
    title = f"Spikes of norms: {len(episodes)} stretches"
    if len(episodes) > rows:
        title += f", the {rows} largest"
    return Table(
        title,
        (
            "steps",
            "first tensor to spike",
            "tensors",
            "furthest out",
            "times its level",
        ),
        [
            (
                _span(history, episode),
                _leaders(episode),
                str(episode.tensors),
                episode.worst,
                f"{episode.ratio:.1f}",
            )
            for episode in shown
        ],
    )


def grid_table(result: WhatIf, rows: int = 12) -> Table:
    """The best settings of a grid; the first one given is always there."""
    order = ranking(result)
    shown = order[:rows] if 0 in order[:rows] else [*order[: rows - 1], 0]
    shared, names = labels(result.variants)
    return Table(
        f"What if: the best of {len(order)} settings" + (shared and f" of {shared}"),
        ("setting", "spikes held", "largest leak", "off ordinary norms", "clip rate"),
        [
            (
                names[i] + (" (asked for)" if i == 0 else ""),
                share(result.held[i]),
                f"{result.tally.leak[i].max():.2g} x",
                share(result.ordinary_loss[i]),
                share(result.clip_rate[i]),
            )
            for i in shown
        ],
        marked=0,
    )


def as_text(table: Table) -> str:
    """A table in plain text."""
    if not table.rows:
        return f"{table.title}: none"
    lines = [table.columns, *table.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def aligned(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        parts = [first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)]
        return "  " + "  ".join(parts).rstrip()

    return "\n".join([table.title, *map(aligned, lines)])


def as_html(table: Table) -> str:
    """A table in HTML."""
    if not table.rows:
        return f"<h2>{html.escape(table.title)}: none</h2>"

    def row(cells: Sequence[str], kind: str, mark: str = "") -> str:
        inner = "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells)
        return f"<tr{mark}>{inner}</tr>"

    body = [
        row(cells, "td", ' class="marked"' if number == table.marked else "")
        for number, cells in enumerate(table.rows)
    ]
    return "\n".join(
        [
            f"<h2>{html.escape(table.title)}</h2>",
            "<table>",
            row(table.columns, "th"),
            *body,
            "</table>",
        ]
    )


def share(value: float) -> str:
    """A share in percent."""
    return "n/a" if np.isnan(value) else f"{100 * value:.2f} %"


def _span(history: History, episode: Episode) -> str:
    first, last = history.steps[episode.first], history.steps[episode.last]
    return str(first) if first == last else f"{first}-{last}"


def _leaders(episode: Episode) -> str:
    more = len(episode.leaders) - 1
    return episode.leaders[0] + (f" and {more} more" if more else "")
