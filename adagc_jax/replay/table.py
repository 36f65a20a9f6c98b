"""Builds a `History` out of the keyed numbers that a log format holds.

Readers of the formats deliver blocks: some rows with the same keys. A schema gives keys
their meaning (step, loss, a tensor's norm, ...); here rows get their order, and what is
odd about a log is either refused with its place or written into the notes.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from adagc_jax.replay.history import WHOLE_TREE, History
from adagc_jax.replay.schema import NORM, STEP_KEYS, Block, Place, Schema


def build(source: str, blocks: Iterable[Block], schema: Schema) -> History:
    """Puts the blocks of one log together."""
    columns = _Columns(source, schema)
    for block in blocks:
        columns.add(block)
    return columns.history()


class _Columns:
    """Collects blocks, then lays them out on one grid of updates and tensors."""

    def __init__(self, source: str, schema: Schema):
        self.source, self.schema = source, schema
        self.parts: list[tuple[dict[str, Place], Block]] = []
        self.names: dict[str, int] = {}
        self.without_norms = 0

    def add(self, block: Block) -> None:
        places = self.schema.places(block.keys)
        columns = {place.column for place in places.values()}
        if not columns & {"norm", "total", "logged_total"}:
            self.without_norms += len(block.values)
            return
        if "step" not in columns:
            raise ValueError(
                f"{self.source} {block.where[0]}: expected a number under "
                f"{STEP_KEYS[0]!r} (or {', '.join(STEP_KEYS[1:])}); the keys are "
                f"{', '.join(block.keys[:5]) or 'none'}."
            )
        for place in places.values():
            if place.column == "norm":
                self.names.setdefault(place.name, len(self.names))
        self._check(places, block)
        self.parts.append((places, block))

    def _check(self, places: dict[str, Place], block: Block) -> None:
        for column, key in enumerate(block.keys):
            place, values = places.get(key), block.values[:, column]
            if place is None:
                continue
            here = block.present[:, column]
            if place.column in ("step", "clip_step"):
                bad, want = ~here | (values != np.floor(values)), "a whole number"
                bad &= here if place.column == "clip_step" else True
            elif place.column == "loss":
                continue
            else:
                bad, want = here & (values < 0), "a number that is not negative"
            if bad.any():
                row = int(np.argmax(bad))
                got = values[row] if here[row] else "nothing"
                raise ValueError(
                    f"{self.source} {block.where[row]}: expected {want} under "
                    f"{key!r}, got {got}."
                )

    def history(self) -> History:
        notes = list(self.schema.notes)
        if self.without_norms:
            notes.append(f"{self.without_norms} rows hold no norms: they are left out")
        if not self.names and self._any("logged_total", "total"):
            notes.append(
                "only the whole tree's norm is logged: it is replayed as one tensor"
            )
        elif not self.names:
            raise ValueError(
                f"{self.source}: expected keys such as 'clip/<tensor>{NORM}', found "
                "none. Log clip_metrics(opt_state, level='all'), or give pattern= "
                "with a group for the tensor's name."
            )
        if self.schema.ignored - {self.schema.prefix}:
            others = ", ".join(sorted(self.schema.ignored))
            notes.append(f"norms under other prefixes are left out: {others}")
        grid = self._grid()
        keep, more = _rows_that_count(grid["step"][:, 0], grid["clip_step"][:, 0])
        grid = {column: values[keep] for column, values in grid.items()}
        if not self.names:
            self.names[WHOLE_TREE] = 0
            seen, total = grid["total"], grid["logged_total"]
            grid["norm"] = np.where(seen > 0, seen, total)
        return _history(tuple(self.names), grid, [*notes, *more])

    def _any(self, *columns: str) -> bool:
        return any(p.column in columns for ps, _ in self.parts for p in ps.values())

    def _grid(self) -> dict[str, Any]:
        """Every column as [rows, tensors], or [rows, 1]; ``-1`` where it is missing."""
        rows = sum(len(block.values) for _, block in self.parts)
        wide = ("norm", "scale", "reference")
        grid: dict[str, Any] = {
            column: np.full((rows, len(self.names)), -1.0, np.float32)
            for column in wide
            if column == "norm" or self._any(column)
        }
        for column in ("step", "clip_step", "loss"):
            missing = np.nan if column == "loss" else -1.0
            grid[column] = np.full((rows, 1), missing, np.float64)
        for column in ("total", "logged_total"):
            grid[column] = np.full((rows, 1), -1.0, np.float32)
        start = 0
        for places, block in self.parts:
            span = slice(start, start := start + len(block.values))
            self._fill(grid, span, places, block)
        return grid

    def _fill(
        self, grid: dict[str, Any], span: slice, places: dict[str, Place], block: Block
    ) -> None:
        for column, out in grid.items():
            pairs = [
                (source, self.names.get(places[key].name, 0))
                for source, key in enumerate(block.keys)
                if key in places
                and places[key].column == column
                and (places[key].name in self.names or not places[key].name)
            ]
            if pairs:
                sources, targets = map(list, zip(*pairs, strict=True))
                old = out[span][:, targets]
                here = block.present[:, sources]
                # Beyond float32 a norm is infinite to the run as well.
                with np.errstate(over="ignore"):
                    new = block.values[:, sources].astype(out.dtype)
                out[span, targets] = np.where(here, new, old)


def _rows_that_count(
    steps: np.ndarray, clip_steps: np.ndarray
) -> tuple[np.ndarray, list[str]]:
    """Rows in order of their step, without repeats of the same update."""
    notes = []
    frozen = np.zeros(len(steps), bool)
    frozen[1:] = (clip_steps[1:] == clip_steps[:-1]) & (clip_steps[1:] >= 0)
    if frozen.any():
        notes.append(
            f"{int(frozen.sum())} rows repeat the update before them (steps that a "
            "guard skipped, or micro-batches): they are left out"
        )
    rows = np.flatnonzero(~frozen)
    _, last = np.unique(steps[rows][::-1], return_index=True)
    keep = rows[len(rows) - 1 - last]
    if len(keep) < len(rows):
        notes.append(
            f"{len(rows) - len(keep)} steps were logged again later (a restart): the "
            "later row counts"
        )
    return keep, notes


def _history(names: tuple[str, ...], grid: dict[str, Any], notes: list[str]) -> History:
    steps = grid["step"][:, 0].astype(np.int64)
    updates, more = _updates(steps, grid["clip_step"][:, 0].astype(np.int64))
    norm = grid["norm"]
    unlogged = norm == -1.0
    notes = [*notes, *more, *_gaps(names, steps, unlogged)]
    total = np.maximum(np.nan_to_num(grid["total"][:, 0], nan=0.0), 0.0)
    # What is missing in a row cannot be added up; a logged total still knows of it.
    partial = (total == 0.0) & unlogged.any(axis=1) & (grid["logged_total"][:, 0] > 0)
    total = np.where(partial, grid["logged_total"][:, 0], total)
    norm[unlogged] = 0.0
    wide = {}
    for column in ("scale", "reference"):
        if column in grid:
            wide[column] = np.where(grid[column] == -1.0, np.nan, grid[column])
    loss = grid["loss"][:, 0]
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


def _updates(steps: np.ndarray, clip_steps: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Updates before each row: the clipper's own count where it is logged."""
    if (clip_steps > 0).all():
        updates = clip_steps - 1
    else:
        updates = steps - (1 if steps[0] == 1 else 0)
    notes = []
    if back := int((np.diff(updates) < 0).sum()):
        notes.append(
            f"the clipper's own count goes back {back} times (rollbacks): the replay "
            "goes on with the references that it has"
        )
    if updates[0] > 0:
        notes += [
            f"the log starts at update {updates[0]}: references start from its first "
            "norms, and a warm-up that was over by then is not replayed"
        ]
    return updates, notes


def _gaps(names: tuple[str, ...], steps: np.ndarray, unlogged: np.ndarray) -> list[str]:
    notes = []
    stride = int(np.median(np.diff(steps))) if len(steps) > 1 else 1
    if stride > 1:
        notes.append(
            f"logged every {stride} steps: the rule learns from logged steps only, so "
            f"its memory is {stride} times as long in steps as that of a real run"
        )
    elif len(steps) > 1 and (holes := int(steps[-1] - steps[0] + 1 - len(steps))):
        notes.append(f"{holes} steps are missing: the rule learns nothing from them")
    late = [n for n, gap in zip(names, unlogged.T, strict=True) if gap[0]]
    if late:
        notes.append(f"{len(late)} tensors appear late, such as {late[0]}")
    holes = unlogged & (np.cumsum(~unlogged, axis=0) > 0)
    if holes.any():
        worst = int(np.argmax(holes.sum(axis=0)))
        notes.append(
            f"{int(holes.any(axis=0).sum())} tensors have gaps, such as "
            f"{names[worst]} ({int(holes[:, worst].sum())} rows): to the rule they "
            "have no gradient there"
        )
    return notes
