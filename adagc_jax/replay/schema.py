"""What the keys of a log stand for, and the blocks in which its rows arrive."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

STEP_KEYS = ("step", "_step", "Step", "global_step", "trainer/global_step")
LOSS_KEYS = ("loss", "train/loss", "train_loss", "training/loss", "loss/train")
COLUMNS = {
    "norm_before": "norm",
    "scale": "scale",
    "gamma": "reference",
    "mean": "reference",
}
NORM = "/norm_before"
_KEY_SETS = 1000
_WORST = (
    "the worst tensors of each step (level='worst') cannot be replayed: log level='all'"
)


class Place(NamedTuple):
    """What a key stands for: a column, and whose."""

    column: str
    name: str = ""


class Block(NamedTuple):
    """Rows with the same keys.

    Attributes:
      where: Of each row: its line, or what else leads to it.
      keys: Names of the columns.
      values: f64[rows, keys].
      present: bool[rows, keys]: False where a row lacks the number.
    """

    where: Sequence[str]
    keys: tuple[str, ...]
    values: np.ndarray
    present: np.ndarray


class Schema:
    """Gives keys their meaning; the first row with norms settles the prefix.

    Attributes:
      seen: All keys that the log has shown.
      ignored: Prefixes of norms that are not asked for.
      notes: What is odd about the log.
    """

    def __init__(self, prefix: str | None, pattern: str | None, loss: str | None):
        self.prefix, self.loss = prefix, loss
        self.pattern = _compiled(pattern) if pattern else None
        self.losses = (loss,) if loss else LOSS_KEYS
        self.seen: dict[str, None] = {}
        self.ignored: set[str] = set()
        self.notes: list[str] = []
        self._known: dict[tuple[str, ...], dict[str, Place]] = {}

    def places(self, keys: Iterable[str]) -> dict[str, Place]:
        """The keys that matter, with their places."""
        keys = tuple(keys)
        if keys not in self._known:
            self.seen.update(dict.fromkeys(keys))
            places = self._places(keys)
            if self.pattern is None and self.prefix is None:
                return places
            if len(self._known) > _KEY_SETS:
                self._known.clear()
            self._known[keys] = places
        return self._known[keys]

    def check_loss(self, source: str) -> None:
        """Refuses a loss that was asked for and is not there."""
        if self.loss and self.loss not in self.seen:
            near = [key for key in self.seen if "loss" in key.lower()]
            raise ValueError(
                f"{source}: no key is loss={self.loss!r}; the keys are "
                f"{_some(near or list(self.seen))}."
            )

    def nothing_found(self, source: str) -> ValueError:
        """That no key holds norms, and which there are."""
        norms = sorted({k.split("/")[0] for k in self.seen if k.endswith(NORM)})
        there = f"the keys are {_some(list(self.seen))}"
        if self.pattern is not None:
            wanted = f"keys that match pattern={self.pattern.pattern!r}"
        else:
            wanted = f"keys such as '{self.prefix or 'clip'}/<tensor>{NORM}'"
            if norms and self.prefix:
                there = f"there are norms under prefix={_some(norms)}"
        return ValueError(
            f"{source}: expected {wanted}, found none; {there}. Log "
            "clip_metrics(opt_state, level='all'), or give pattern='grad_norm/(.+)' "
            "with a group for the tensor's name."
        )

    def _places(self, keys: tuple[str, ...]) -> dict[str, Place]:
        if self.pattern is None and self.prefix is None:
            self.prefix = _find_prefix(keys)
        found = {key: self._place(key) for key in keys}
        places = {key: place for key, place in found.items() if place is not None}
        for column, candidates in (("step", STEP_KEYS), ("loss", self.losses)):
            key = next((c for c in candidates if c in keys), None)
            if key is not None:
                places[key] = Place(column)
        return places

    def _place(self, key: str) -> Place | None:
        if self.pattern is not None:
            match = self.pattern.fullmatch(key)
            return Place("norm", match.group(1)) if match else None
        start, rest = f"{self.prefix}/", key.rpartition("/")[2]
        if not key.startswith(start):
            if key.endswith(NORM):
                self.ignored.add(key.split("/")[0])
            return None
        if key == start + rest:
            total = {"norm_before": "logged_total", "norm_seen": "total"}
            column = {"step": "clip_step", **total}.get(rest)
            return Place(column) if column else None
        column, name = COLUMNS.get(rest), key[len(start) : -len(rest) - 1]
        if column and re.fullmatch(r"worst/\d+", name):
            # Places in a ranking, which other tensors take in every step.
            if _WORST not in self.notes:
                self.notes.append(_WORST)
            return None
        return Place(column, name) if column else None


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"pattern must be a regular expression, got {pattern!r}: {error}."
        ) from error
    if compiled.groups != 1:
        raise ValueError(
            f"pattern must have one group, the tensor's name, got {pattern!r}; "
            r"for keys such as grad_norm/w: 'grad_norm/(.+)'."
        )
    return compiled


def _some(keys: Sequence[str]) -> str:
    return ", ".join(keys[:8]) + (", ..." if len(keys) > 8 else "") or "none"


def _find_prefix(keys: Sequence[str]) -> str | None:
    stems = [key[: -len(NORM)] for key in keys if key.endswith(NORM)]
    if not stems:
        return None
    parents = [s for s in stems if any(t.startswith(f"{s}/") for t in stems)]
    over_all = [p for p in parents if all(f"{s}/".startswith(f"{p}/") for s in stems)]
    if over_all:
        return min(over_all, key=len)
    if parents:
        raise ValueError(
            f"the log holds several clippers ({', '.join(sorted(parents)[:5])}): "
            f"choose one with prefix={min(parents)!r}."
        )
    return stems[0].split("/")[0] if len(stems) > 1 or "/" in stems[0] else stems[0]
