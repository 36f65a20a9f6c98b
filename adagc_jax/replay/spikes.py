"""Which norms were spikes, and which tensor was first: known before any rule is run.

A norm is a spike if it stands out of what its tensor has around it: beyond ``ratio``
times its level, which is the larger of two medians, over the window before and over its
own. A rise that lasts moves the second one and is none. Nothing here depends on a rule,
so that all settings of a grid are measured against the same spikes. In a list of
episodes a norm that is not finite is the worst of spikes; held or not, it is none, as
there a policy decides and not a rule.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from adagc_jax.replay.history import History

# Rows looked at together, which bounds the memory.
_BLOCK = 8192


@dataclasses.dataclass(frozen=True)
class SpikeMeasure:
    """What counts as a spike of a norm, and as one that was held.

    Attributes:
      window: Updates per median; the first window has no spikes.
      ratio: A norm above this many times its level is a spike.
      held: A spike is held if at most this many times the level is emitted.
    """

    window: int = 100
    ratio: float = 3.0
    held: float = 2.0

    def __post_init__(self):
        """Refuses measures that no norm can meet."""
        if self.window < 2:
            raise ValueError(f"window must be at least 2, got {self.window!r}.")
        if not 1.0 <= self.held <= self.ratio:
            raise ValueError(
                "held and ratio must be 1 <= held <= ratio, got "
                f"{self.held!r} and {self.ratio!r}."
            )


class Episode(NamedTuple):
    """A stretch of updates in which some tensor spiked, or was not finite.

    Attributes:
      first: Row of its first update; ``last`` of its last.
      last: See ``first``.
      leaders: Tensors that spiked in the first update: all at once, as far as the log
        can tell; the furthest out is named first, and one that is not finite before.
      tensors: How many spiked at any time in it.
      worst: The tensor that was furthest out; ``ratio`` by how many times its level.
      ratio: See ``worst``; inf for a norm that is not finite.
    """

    first: int
    last: int
    leaders: tuple[str, ...]
    tensors: int
    worst: str
    ratio: float


def spike_levels(history: History, measure: SpikeMeasure) -> np.ndarray:
    """Level of every tensor in each window, f32[windows, tensors]; inf: no spikes."""
    steps, window = len(history.steps), measure.window
    # The last window reaches back: a spike alone in it would be its own level.
    starts = [min(at, max(steps - window, 0)) for at in range(0, steps, window)]
    levels = np.stack([_median(history.norm[at : at + window]) for at in starts])
    levels[1:] = np.maximum(levels[1:], levels[:-1])
    levels[0] = np.inf
    return np.where(levels > 0, levels, np.inf).astype(np.float32)


def levels_of(levels: np.ndarray, measure: SpikeMeasure, rows: slice) -> np.ndarray:
    """The level of every tensor in some updates, f32[rows, tensors]."""
    return levels[np.arange(rows.start, rows.stop) // measure.window]


def find_episodes(
    history: History, measure: SpikeMeasure | None = None
) -> list[Episode]:
    """Stretches of spikes, in order; closer than ten updates they are one.

    Args:
      history: Of `read_history`.
      measure: What a spike is.

    Returns:
      A list of `Episode`; ``history.steps[episode.first]`` is the step of its start.

    Raises:
      ValueError: for a measure out of range.

    Example:
      >>> import numpy as np
      >>> from adagc_jax.replay import History
      >>> steps, norm = np.arange(300), np.ones((300, 2), np.float32)
      >>> norm[200, 1] = 8.0
      >>> history = History(("a", "b"), steps, steps, norm, np.zeros(300, np.float32))
      >>> find_episodes(history)[0].leaders
      ('b',)
    """
    measure = measure or SpikeMeasure()
    ratios = _spike_ratios(history, measure)
    rows = np.flatnonzero(ratios.max(axis=1, initial=0.0) > 0)
    if not len(rows):
        return []
    stretches = np.split(rows, np.flatnonzero(np.diff(rows) > 10) + 1)
    return [_episode(history, ratios, stretch) for stretch in stretches]


def spike_rows(history: History, measure: SpikeMeasure) -> np.ndarray:
    """The row of every spike, finite ones only, ascending: one for each tensor."""
    levels, found = spike_levels(history, measure), [np.zeros(0, np.intp)]
    for start in range(0, len(history.steps), _BLOCK):
        rows = slice(start, min(start + _BLOCK, len(history.steps)))
        norm, level = history.norm[rows], levels_of(levels, measure, rows)
        is_spike = np.isfinite(norm) & (norm > measure.ratio * level)
        found.append(start + np.nonzero(is_spike)[0])
    return np.concatenate(found)


def first_not_finite(history: History) -> tuple[int, tuple[str, ...]] | None:
    """The first row with a norm that is not finite, and the tensors; None if none."""
    bad = ~np.isfinite(history.norm)
    rows = np.flatnonzero(bad.any(axis=1))
    if not len(rows):
        return None
    row = int(rows[0])
    return row, tuple(history.names[i] for i in np.flatnonzero(bad[row]))


def _spike_ratios(history: History, measure: SpikeMeasure) -> np.ndarray:
    """How many times its level a spike was; 0 for all other norms."""
    every = levels_of(
        spike_levels(history, measure), measure, slice(0, len(history.steps))
    )
    finite = np.isfinite(history.norm)
    norm = np.where(finite, history.norm, 0.0)
    ratios = np.where(norm > measure.ratio * every, norm / every, 0.0)
    # Without a level yet, a norm that is not finite is one all the same.
    return np.where(finite, ratios, np.inf)


def _episode(history: History, ratios: np.ndarray, rows: np.ndarray) -> Episode:
    start = ratios[rows[0]]
    order = np.argsort(-start, kind="stable")
    peaks = ratios[rows].max(axis=0)
    worst = int(np.argmax(peaks))
    return Episode(
        first=int(rows[0]),
        last=int(rows[-1]),
        leaders=tuple(history.names[i] for i in order if start[i] > 0),
        tensors=int((peaks > 0).sum()),
        worst=history.names[worst],
        ratio=float(peaks[worst]),
    )


def _median(norms: np.ndarray) -> np.ndarray:
    """Median over rows of the norms that are there; 0 for a tensor without any."""
    usable = np.isfinite(norms) & (norms > 0)
    middle = np.median(norms, axis=0) if usable.all() else np.zeros(norms.shape[1])
    for column in np.flatnonzero(~usable.all(axis=0)):
        some = norms[usable[:, column], column]
        middle[column] = np.median(some) if len(some) else 0.0
    if not usable.all():
        full = usable.all(axis=0)
        middle[full] = np.median(norms[:, full], axis=0)
    return middle
