"""The answer in sentences: what was read, what was found, and what to make of it."""

from collections.abc import Sequence

import numpy as np

from adagc_jax.replay.answers import Suggestion, scope, suggest
from adagc_jax.replay.engine import Replayed
from adagc_jax.replay.history import History
from adagc_jax.replay.report import Report
from adagc_jax.replay.spikes import find_episodes, first_not_finite
from adagc_jax.replay.tables import Table, episode_table, grid_table, tensor_table
from adagc_jax.replay.tally import activity_of
from adagc_jax.replay.whatif import WhatIf
from adagc_jax.replay.words import first_of, number_of, share


def make_report(
    source: str, history: History, result: WhatIf, replayed: Replayed
) -> Report:
    """All that a replay came to, of the first setting and of the grid behind it."""
    episodes = find_episodes(history, result.measure)
    suggestion = suggest(result) if len(result.variants) > 1 else None
    tables: list[Table] = [
        tensor_table(result),
        episode_table(history, episodes, scored_from=result.scored_from),
    ]
    if suggestion is not None:
        tables.append(grid_table(result))
    lines = [
        describe(history) + ".",
        _verdict(result),
        *_not_finite(history),
        *_comparison(history, replayed),
        *_suggested(suggestion),
    ]
    return Report(
        source, history, replayed, result, episodes, lines, tables, suggestion
    )


def describe(history: History) -> str:
    """How long a log is, and how wide."""
    return (
        f"{number_of(len(history.steps), 'update')} (steps {history.steps[0]} to "
        f"{history.steps[-1]}) of {number_of(len(history.names), 'tensor')}"
    )


def _verdict(result: WhatIf) -> str:
    text = f"{result.variants[0]} clips {share(result.clip_rate[0])} of all gradients"
    if not result.scored[0]:
        late = "too short: nothing was scored, its warm-up leaves too little of the log"
        return f"{text}; {late if result.scored.any() else scope(result)}."
    if not result.spikes:
        return f"{text}; there are no spikes ({scope(result)})."
    return (
        f"{text}; of {number_of(result.spikes, 'spike')} ({scope(result)}) it holds "
        f"{share(result.held[0])} to {result.measure.held:g} times their level, and it "
        f"takes {share(result.ordinary_loss[0])} off ordinary norms."
    )


def _not_finite(history: History) -> Sequence[str]:
    """The first NaN or infinity: what made it is what to look for."""
    found = first_not_finite(history)
    if found is None:
        return []
    row, names = found
    number = number_of(int((~np.isfinite(history.norm)).sum()), "norm")
    value = history.norm[row, history.index(names[0])]
    at_once = " in the same step" if len(names) > 1 else ""
    return [
        f"Not finite: {number}, the first at step {history.steps[row]}: "
        f"{first_of(names)}{at_once} ({value})."
    ]


def _comparison(history: History, replayed: Replayed) -> Sequence[str]:
    """Whether the log's own scales are those of the replay."""
    scale = replayed.history.scale
    if history.scale is None or scale is None:
        return []
    active, clipped = activity_of(history)
    known = ~np.isnan(history.scale)
    if not known.any():
        return []
    same = history.scale == np.broadcast_to(scale, known.shape)
    rate = clipped.sum() / active.sum() if active.any() else np.nan
    return [
        f"The run itself clipped {share(rate)} of its gradients; "
        f"{share(same[known].mean())} of its logged scales are those of "
        f"{replayed.variant}, bit for bit."
    ]


def _suggested(suggestion: Suggestion | None) -> Sequence[str]:
    if suggestion is None:
        return []
    return [
        f"Suggestion: {suggestion.variant or 'none'}",
        f"Reason: {suggestion.reason}",
        f"But: {suggestion.caveat}",
    ]
