"""What goes wrong in a training run, and when: the scenarios, split beforehand.

Each half has short, long and early bursts, a fault of one tensor, noise, and a run in
which nothing happens. Hyper-parameters are chosen on the first half; the second, with
other kinds, lengths, steps and seeds, is what is reported.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
from _data import CORRUPTIONS, Corpus, train_batch

STEPS = 240
# The end of the learning rate's warm-up.
LR_WARMUP = 12
# Faults of the gradients; every other kind is one of corrupted batches.
LOSS, TENSOR, IDLE = "loss x 100", "tensor x 1000", "tensor idle"
_FAULTS = {TENSOR: 1000, IDLE: 0}


@dataclasses.dataclass(frozen=True)
class Event:
    """`length` steps in a row, from `step` on, that go wrong in one way."""

    kind: str
    step: int
    length: int

    def __post_init__(self):
        if self.kind not in (*CORRUPTIONS, LOSS, *_FAULTS):
            raise ValueError(f"kind must be a corruption or a fault: {self.kind!r}")

    def __contains__(self, step: int) -> bool:
        return self.step <= step < self.step + self.length


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One training run's troubles.

    Attributes:
      name: In tables.
      events: What goes wrong.
      change: Step from which on all text is another one, at validation too.
      rewarm: Step at which the learning rate starts again, from a tenth of the peak.
      noisy: Whether each batch has a quarter of its sequences, four times each.
    """

    name: str
    events: tuple[Event, ...] = ()
    change: int | None = None
    rewarm: int | None = None
    noisy: bool = False

    def kind(self, step: int) -> str:
        return next((e.kind for e in self.events if step in e), "clean")


def _twice(kind: str, length: int, first: int = 110, second: int = 175) -> Scenario:
    events = (Event(kind, first, length), Event(kind, second, length))
    return Scenario(f"{kind}, {length} steps, twice", events)


TUNING = (
    Scenario("nothing happens"),
    _twice("random", 1),
    _twice("xor", 5),
    Scenario("random, 10 steps", (Event("random", 120, 10),)),
    Scenario("labels, 3 steps, in the warm-up", (Event("labels", 8, 3),)),
    _twice(TENSOR, 3),
    Scenario("noisy gradients", noisy=True),
)
REPORT = (
    Scenario("nothing happens, other seeds"),
    _twice("xor", 1, 95, 160),
    _twice("constant", 3, 100, 165),
    _twice("random", 5, 90, 170),
    Scenario("labels, 10 steps", (Event("labels", 115, 10),)),
    Scenario("constant, 30 steps", (Event("constant", 110, 30),)),
    Scenario("random, 5 steps, just after the warm-up", (Event("random", 30, 5),)),
    Scenario("xor, 2 steps, in the warm-up", (Event("xor", 6, 2),)),
    _twice(LOSS, 5, 100, 165),
    Scenario("tensor x 1000, 10 steps", (Event(TENSOR, 130, 10),)),
    Scenario("other data from step 120", change=120),
    Scenario("learning rate starts again at 130", rewarm=130),
    Scenario("noisy, random, 3 steps", (Event("random", 130, 3),), noisy=True),
)
# What models and optimizers are varied on: a spread of lengths.
VARIED = tuple(REPORT[i] for i in (0, 2, 3, 5))


class Data(NamedTuple):
    """What one seed's run is fed, step by step, and what it is validated on."""

    inputs: np.ndarray
    targets: np.ndarray
    loss_scale: np.ndarray
    fault: np.ndarray
    lr: np.ndarray
    validation_inputs: np.ndarray
    validation_targets: np.ndarray


def make(
    scenario: Scenario, corpus: Corpus, seed: int, batch: int, length: int, steps: int
) -> Data:
    """All batches [steps, batch, length] and faults [steps] of a run."""
    inputs, targets = zip(
        *(_batch(scenario, corpus, seed, step, batch, length) for step in range(steps)),
        strict=True,
    )
    kinds = np.array([scenario.kind(step) for step in range(steps)])
    starts = np.linspace(0, corpus.validation.size - length - 1, 16 * batch)
    windows = corpus.validation[starts.astype(int)[:, None] + np.arange(length + 1)]
    if scenario.change is not None:
        windows = _other_text(windows)
    return Data(
        np.stack(inputs),
        np.stack(targets),
        np.where(kinds == LOSS, 100, 1).astype(np.float32),
        np.array([_FAULTS.get(kind, 1) for kind in kinds], np.float32),
        learning_rates(steps, scenario.rewarm),
        windows[:, :-1].astype(np.int32),
        windows[:, 1:].astype(np.int32),
    )


def learning_rates(steps: int, rewarm: int | None) -> np.ndarray:
    """Factors of the peak [steps]: linear warm-up, cosine to a tenth; once or twice."""

    def rise_and_fall(steps: int, start: float) -> np.ndarray:
        up = start + (1 - start) * np.arange(1, LR_WARMUP + 1) / LR_WARMUP
        fall = np.linspace(0, np.pi, max(steps - LR_WARMUP, 1))
        return np.concatenate([up, 0.55 + 0.45 * np.cos(fall)])[:steps]

    if rewarm is None:
        return rise_and_fall(steps, 0.0).astype(np.float32)
    parts = rise_and_fall(rewarm, 0.0), rise_and_fall(steps - rewarm, 0.1)
    return np.concatenate(parts).astype(np.float32)


def _batch(
    scenario: Scenario, corpus: Corpus, seed: int, step: int, batch: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    kind = scenario.kind(step)
    copies = 4 if scenario.noisy else 1
    text = corpus.train
    x, y = train_batch(
        text,
        seed=seed,
        step=step,
        batch_size=max(batch // copies, 1),
        length=length,
        kind=kind if kind in CORRUPTIONS else "clean",
    )
    if scenario.change is not None and step >= scenario.change:
        x, y = _other_text(x), _other_text(y)
    return np.tile(x, (copies, 1))[:batch], np.tile(y, (copies, 1))[:batch]


def _other_text(bytes_: np.ndarray) -> np.ndarray:
    """A text as regular as before in other letters: letters turn by thirteen."""
    table = np.arange(256)
    for first in (65, 97):
        letters = np.arange(first, first + 26)
        table[letters] = np.roll(letters, 13)
    return table[bytes_].astype(bytes_.dtype)
