"""Builds a `History` out of the keyed numbers that a log format holds.

Readers of the formats deliver blocks: some rows with the same keys. A schema gives keys
their meaning (step, loss, a tensor's norm, ...); here rows are checked, merged by step
and laid out, and what is odd about a log is either refused with its place or written
into the notes.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from adagc_jax.replay.history import WHOLE_TREE, History
from adagc_jax.replay.merge import WIDE, Grid, Part, Targets, merge, missing
from adagc_jax.replay.oddities import gaps, updates_of
from adagc_jax.replay.schema import STEP_KEYS, Block, Place, Schema
from adagc_jax.replay.words import number_of

# As far as a float64 knows one from the next.
_MOST_STEPS = 2**53
_COUNT = "a whole number from 0 to 2**53"
_SIZES = ("norm", "total", "logged_total")


def build(source: str, blocks: Iterable[Block], schema: Schema) -> History:
    """Puts the blocks of one log together."""
    parts = _Parts(source, schema)
    for block in blocks:
        parts.add(block)
    schema.check_loss(source)
    return parts.history()


class _Plan(NamedTuple):
    """What to do with rows of some keys: where the step is, what to check, to keep."""

    step: int | None
    whole: list[int]
    sizes: list[int]
    targets: Targets


class _Parts:
    """Collects the rows of a log, checked."""

    def __init__(self, source: str, schema: Schema):
        self.source, self.schema = source, schema
        self.parts: list[Part] = []
        self.names: dict[str, int] = {}
        self.normed: dict[str, int] = {}
        self.plans: dict[int, tuple[dict[str, Place], _Plan]] = {}
        self.rows = self.without_norms = 0

    def add(self, block: Block) -> None:
        self.rows += len(block.values)
        places = self.schema.places(block.keys)
        plan = self._plan(places, block.keys)
        norms = any(column in plan.targets for column in _SIZES)
        if plan.step is None and norms:
            raise ValueError(
                f"{self.source} {block.where[0]}: expected a number under "
                f"{STEP_KEYS[0]!r} (or {', '.join(STEP_KEYS[1:])}); the keys are "
                f"{', '.join(block.keys[:5]) or 'none'}."
            )
        if plan.step is None or not plan.targets:
            self.without_norms += len(block.values)
            return
        if not norms:
            there = block.present[:, plan.step]
            self.without_norms += int((~there).sum())
            block = _rows_of(block, there)
        if len(block.values):
            self._check(plan, block)
            steps = block.values[:, plan.step].astype(np.int64)
            self.parts.append(Part(steps, plan.targets, block))

    def _plan(self, places: dict[str, Place], keys: tuple[str, ...]) -> _Plan:
        """Worked out once for each set of keys, whose places a schema remembers."""
        known = self.plans.get(id(places))
        if known is None or known[0] is not places:
            known = self.plans[id(places)] = places, self._new_plan(places, keys)
        return known[1]

    def _new_plan(self, places: dict[str, Place], keys: tuple[str, ...]) -> _Plan:
        for key in keys:
            if key in places and places[key].column == "norm":
                self.normed.setdefault(places[key].name, self._index(places[key].name))
        plan = _Plan(None, [], [], {})
        for source, key in enumerate(keys):
            place = places.get(key)
            if place is None:
                continue
            if place.column == "step":
                plan = plan._replace(step=source)
            elif place.column != "loss":
                (plan.whole if place.column == "clip_step" else plan.sizes).append(
                    source
                )
            if place.column != "step":
                sources, names = plan.targets.setdefault(place.column, ([], []))
                sources.append(source)
                tensor = place.column in WIDE
                names.append(self._index(place.name) if tensor else 0)
        return plan

    def _index(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))

    def _check(self, plan: _Plan, block: Block) -> None:
        values, here = block.values, block.present
        count = (values >= 0) & (values < _MOST_STEPS) & (values == np.floor(values))
        want = np.zeros(len(block.keys), bool)
        want[[plan.step, *plan.whole]] = True
        bad = here & want & ~count
        bad[:, plan.step] |= ~here[:, plan.step]
        bad[:, plan.sizes] |= here[:, plan.sizes] & (values[:, plan.sizes] < 0)
        if not bad.any():
            return
        row, column = np.argwhere(bad)[0]
        got = values[row, column] if here[row, column] else "nothing"
        expected = _COUNT if want[column] else "a number that is not negative"
        raise ValueError(
            f"{self.source} {block.where[row]}: expected {expected} under "
            f"{block.keys[column]!r}, got {got}."
        )

    def history(self) -> History:
        if not self.rows:
            raise ValueError(f"{self.source}: the log is empty: it holds no rows.")
        given = {column for part in self.parts for column in part.targets}
        if not given & set(_SIZES):
            raise self.schema.nothing_found(self.source)
        notes = list(self.schema.notes)
        merged = merge(self.parts, len(self.names))
        self.parts.clear()
        keep, more = _rows_that_count(merged.grid, merged.undone, self.without_norms)
        notes += [*merged.notes, *more]
        grid = {column: values[keep] for column, values in merged.grid.items()}
        if "norm" not in given:
            notes.append(
                "only the whole tree's norm is logged: it is replayed as one tensor"
            )
            self.normed = {WHOLE_TREE: 0}
            seen, total = grid["total"], grid["logged_total"]
            grid["norm"] = np.where(seen > 0, seen, total)
            grid = {k: v for k, v in grid.items() if k not in ("scale", "reference")}
        if others := self.schema.ignored - {self.schema.prefix}:
            listed = ", ".join(sorted(others))
            notes.append(f"norms under other prefixes are left out: {listed}")
        # A tensor whose scale alone is logged cannot be replayed.
        columns = list(self.normed.values())
        for column in WIDE:
            if column in grid and columns != list(range(grid[column].shape[1])):
                grid[column] = grid[column][:, columns]
        return _history(tuple(self.normed), merged.steps[keep], grid, notes)


def _rows_of(block: Block, keep: np.ndarray) -> Block:
    where = [place for place, kept in zip(block.where, keep, strict=True) if kept]
    return Block(where, block.keys, block.values[keep], block.present[keep])


def _rows_that_count(
    grid: Grid, undone: np.ndarray, without_norms: int
) -> tuple[np.ndarray, list[str]]:
    """Rows with norms, without repeats of the same update."""
    notes = []
    norms = np.any([(grid[column] != -1.0).any(axis=1) for column in _SIZES], axis=0)
    if empty := without_norms + int((~norms & ~undone).sum()):
        hold = "holds" if empty == 1 else "hold"
        notes.append(f"{number_of(empty, 'row')} {hold} no norms: left out")
    rows = np.flatnonzero(norms)
    counts = grid["clip_step"][rows, 0]
    frozen = np.zeros(len(rows), bool)
    frozen[1:] = (counts[1:] == counts[:-1]) & (counts[1:] >= 0)
    if frozen.any():
        notes.append(
            f"{number_of(int(frozen.sum()), 'row')} with the same update as the row "
            "before (steps that a guard skipped, or micro-batches): left out"
        )
    return rows[~frozen], notes


def _history(
    names: tuple[str, ...], steps: np.ndarray, grid: Grid, notes: list[str]
) -> History:
    updates, more = updates_of(steps, grid["clip_step"][:, 0].astype(np.int64))
    norm = grid["norm"]
    unlogged = norm == -1.0
    notes = [*notes, *more, *gaps(names, steps, unlogged)]
    total = np.maximum(np.nan_to_num(grid["total"][:, 0], nan=0.0), 0.0)
    # What is missing in a row cannot be added up; a logged total still knows of it.
    partial = (total == 0.0) & unlogged.any(axis=1) & (grid["logged_total"][:, 0] > 0)
    total = np.where(partial, grid["logged_total"][:, 0], total)
    norm[unlogged] = 0.0
    wide = {}
    for column in ("scale", "reference"):
        if column in grid:
            wide[column] = np.where(grid[column] == -1.0, np.nan, grid[column])
    loss = np.where(grid["loss"] == missing("loss"), np.nan, grid["loss"])[:, 0]
    has_loss = not np.isnan(loss).all()
    return History(
        names=names,
        steps=steps,
        updates=updates,
        norm=norm,
        total=total.astype(np.float32),
        loss=loss if has_loss else None,
        notes=tuple(notes),
        **wide,
    )
