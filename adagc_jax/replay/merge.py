"""Merges all that was logged at a step, in however many lines, into one row.

Between the blocks of a reader and the `History` built from them. A null is no number
and overwrites none. Where a run was restarted from an older step, its log goes back and
holds the same keys again: what was logged from that step on is then no part of the run,
and is dropped as TensorBoard does.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from adagc_jax.replay.schema import Block
from adagc_jax.replay.words import number_of

# No norm is negative, and a loss may be anything else.
MISSING = {"loss": float(np.finfo(np.float64).min)}
WIDE = ("norm", "scale", "reference")
_DTYPES = {"loss": np.float64, "clip_step": np.float64}

Targets = dict[str, tuple[list[int], list[int]]]
Grid = dict[str, np.ndarray]


class Part(NamedTuple):
    """Rows with the same keys, ascending steps, and where their numbers belong.

    Attributes:
      steps: Of the rows, i64.
      targets: For each column of the grid, columns of the block and their tensors.
      block: The rows.
    """

    steps: np.ndarray
    targets: Targets
    block: Block


class Merged(NamedTuple):
    """All rows of a log.

    Attributes:
      steps: i64[rows], ascending.
      grid: [rows, tensors], or [rows, 1], for each column; `missing` where empty.
      undone: bool[rows], where a restart has dropped numbers.
      notes: What was dropped.
    """

    steps: np.ndarray
    grid: Grid
    undone: np.ndarray
    notes: list[str]


def missing(column: str) -> float:
    """The number that stands for none."""
    return MISSING.get(column, -1.0)


def merge(parts: Sequence[Part], tensors: int) -> Merged:
    """Puts parts, in the order in which they were logged, on one grid of steps."""
    steps = np.unique(np.concatenate([part.steps for part in parts]))
    given = {column for part in parts for column in part.targets}
    columns = {"norm", "total", "logged_total", "clip_step", "loss"} | given
    grid = {
        column: np.full(
            (len(steps), tensors if column in WIDE else 1),
            missing(column),
            _DTYPES.get(column, np.float32),
        )
        for column in sorted(columns)
    }
    merger = _Merger(steps, grid)
    for part in parts:
        for run in _ascending(part):
            merger.add(run)
    return Merged(steps, grid, merger.undone, merger.notes())


def _ascending(part: Part) -> Iterator[Part]:
    """The same rows, cut wherever the step does not go up."""
    cuts = [0, *(np.flatnonzero(np.diff(part.steps) <= 0) + 1), len(part.steps)]
    for start, stop in pairwise(cuts):
        rows, block = slice(start, stop), part.block
        cut = block._replace(values=block.values[rows], present=block.present[rows])
        yield Part(part.steps[rows], part.targets, cut)


class _Written(NamedTuple):
    """What a part has written and no restart has undone."""

    slots: np.ndarray
    targets: Targets


class _Merger:
    """Writes one part after the other onto the grid."""

    def __init__(self, steps: np.ndarray, grid: Grid):
        self.steps, self.grid = steps, grid
        self.undone = np.zeros(len(steps), bool)
        self.written: list[_Written] = []
        self.latest = -1
        self.repeated = 0
        self.restarts: set[int] = set()

    def add(self, part: Part) -> None:
        slots = np.searchsorted(self.steps, part.steps)
        if slots[0] <= self.latest:
            again = self._again(slots, part)
            if again.any():
                first = int(slots[np.argmax(again)])
                if first < self.latest:
                    self._undo(first, part.targets)
                    self.latest = -1
                else:
                    self.repeated += 1
        self._write(slots, part)
        self.written.append(_Written(slots, part.targets))
        self.latest = max(self.latest, int(slots[-1]))

    def _again(self, slots: np.ndarray, part: Part) -> np.ndarray:
        """Rows that hold a number where there is one already."""
        again = np.zeros(len(slots), bool)
        for column, (sources, tensors) in part.targets.items():
            there = self.grid[column][slots[:, None], tensors] != missing(column)
            again |= (there & part.block.present[:, sources]).any(axis=1)
        return again

    def _write(self, slots: np.ndarray, part: Part) -> None:
        for column, (sources, tensors) in part.targets.items():
            out, here = self.grid[column], part.block.present[:, sources]
            # Beyond float32 a norm is infinite to the run as well.
            with np.errstate(over="ignore"):
                new = part.block.values[:, sources].astype(out.dtype)
            cells = slots[:, None], tensors
            out[cells] = new if here.all() else np.where(here, new, out[cells])

    def _undo(self, first: int, targets: Targets) -> None:
        """Drops what was logged from a step on, since these keys were last at it."""
        start = len(self.written)
        for at in range(len(self.written) - 1, -1, -1):
            slots, theirs = self.written[at]
            if not _share(theirs, targets):
                continue
            # The same keys go up from here back to the start: nothing is left.
            if slots[-1] < first:
                break
            start = at
        for at in range(start, len(self.written)):
            slots, theirs = self.written[at]
            keep = int(np.searchsorted(slots, first))
            gone = slots[keep:]
            for column, (_, tensors) in theirs.items():
                self.grid[column][gone[:, None], tensors] = missing(column)
            self.undone[gone] = True
            self.written[at] = _Written(slots[:keep], theirs)
        self.written = [w for w in self.written if len(w.slots)]
        self.restarts.add(first)

    def notes(self) -> list[str]:
        notes = []
        if self.restarts:
            first = self.steps[min(self.restarts)]
            rows = number_of(int(self.undone.sum()), "row")
            times = number_of(len(self.restarts), "restart")
            notes.append(
                f"the step goes back to {first} ({times}): {rows} of the abandoned "
                "branch are left out"
            )
        if self.repeated:
            steps = number_of(self.repeated, "step")
            notes.append(f"{steps} logged again at once: the later numbers count")
        return notes


def _share(one: Targets, other: Targets) -> bool:
    """Whether two parts hold the same keys, or some of them."""
    return one is other or any(
        column in other and not set(tensors).isdisjoint(other[column][1])
        for column, (_, tensors) in one.items()
    )
