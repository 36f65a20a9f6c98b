"""The answers as tables of text: for a terminal, plain or rich, and for HTML."""

import html
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from adagc_jax.replay.answers import ranking, suggest
from adagc_jax.replay.history import History
from adagc_jax.replay.spikes import Episode
from adagc_jax.replay.variants import labels
from adagc_jax.replay.whatif import WhatIf
from adagc_jax.replay.words import first_of, number_of, share as share


class Table(NamedTuple):
    """A title, names of columns (numbers stand at the right), and rows of text.

    One row may be marked; notes explain the columns, on a page.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    marked: int | None = None
    notes: tuple[str, ...] = ()


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
                str(tally.held[variant][i]) if result.scored[variant] else "n/a",
            )
            for i in order
        ],
        notes=(
            "clip rate: share of the gradients that are neither zero nor dropped.",
            "longest row: most clipped updates without a break.",
        ),
    )


def episode_table(
    history: History,
    episodes: Sequence[Episode],
    rows: int = 10,
    *,
    scored_from: int = 0,
) -> Table:
    """The largest stretches of spikes, in the order of time; the first is among them.

    Those before the row ``scored_from`` are marked: nothing else counts their spikes.
    """
    largest = sorted(episodes[1:], key=lambda e: -e.ratio)[: rows - 1]
    shown = sorted([*episodes[:1], *largest], key=lambda e: e.first)
    stretches = "stretches" if len(episodes) != 1 else "stretch"
    title = f"Spikes of norms: {len(episodes)} {stretches}"
    if len(episodes) > rows:
        title += f", the first and the {rows - 1} largest others"
    return Table(
        title,
        (
            "steps",
            "first to spike",
            "tensors",
            "furthest out",
            "times its level",
        ),
        [
            (
                _span(history, episode, scored_from),
                first_of(episode.leaders),
                str(episode.tensors),
                episode.worst,
                f"{episode.ratio:.1f}" if np.isfinite(episode.ratio) else "not finite",
            )
            for episode in shown
        ],
        notes=(
            "first to spike: in the first step of the stretch; those that spike in the "
            "same step are all first, and the one furthest out is named.",
            "level of a tensor: the larger of its median norms over the window before "
            "and over its own window.",
        ),
    )


def grid_table(result: WhatIf, rows: int = 12) -> Table:
    """The best settings of a grid; the first one given is always there."""
    order = ranking(result)
    shown = order[:rows] if 0 in order[:rows] else [*order[: rows - 1], 0]
    shared, names = labels(result.variants)
    measure = result.measure
    number = number_of(len(order), "setting")
    return Table(
        f"What if: the best of {number}" + (shared and f" of {shared}"),
        ("setting", "spikes held", "largest leak", "off ordinary norms", "clip rate"),
        [
            (
                names[i] + (" (asked for)" if i == 0 else ""),
                share(result.held[i]) if result.scored[i] else "too short",
                f"{result.leak[i]:.2g} x" if result.scored[i] else "n/a",
                share(result.ordinary_loss[i]),
                share(result.clip_rate[i]),
            )
            for i in shown
        ],
        marked=None if suggest(result).variant is None else 0,
        notes=(
            f"spikes held: share of the norms above {measure.ratio:g} times their "
            f"level that come through at {measure.held:g} times it or less.",
            "largest leak: the largest spike that comes through, in times its level.",
            "off ordinary norms: what is taken off all other norms, on average.",
            "too short: the warm-up leaves too little of the log, nothing was scored.",
        ),
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
            *(f'<p class="note">{html.escape(note)}</p>' for note in table.notes),
        ]
    )


def _span(history: History, episode: Episode, scored_from: int) -> str:
    first, last = history.steps[episode.first], history.steps[episode.last]
    span = str(first) if first == last else f"{first}-{last}"
    return span + (" (not scored)" if episode.first < scored_from else "")
