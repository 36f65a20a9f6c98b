"""The cells of the study: one rule in one scenario, all its settings and seeds.

tasks -> one compiled program each -> cells on disk, found again by a later run
"""

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from _analysis import jump
from _data import load_corpus
from rules import Rule
from scenarios import STEPS, Data, Scenario, make
from setups import Setup
from train import new_run

from adagc_jax import spike_score

# The loss of knowing nothing: what a run counts for that ended in NaN, or above.
KNOWS_NOTHING = float(np.log(256))


@dataclasses.dataclass(frozen=True)
class Task:
    """What one compiled program serves.

    Attributes:
      phase: One of `plan.PHASES`.
      setup: Model and optimizer.
      rule: The clipper.
      settings: Of its hyper-parameters.
      scenarios: What it goes through.
      seeds: Of parameters and batches.
      steps: Of training.
    """

    phase: str
    setup: Setup
    rule: Rule
    settings: tuple[tuple[float, ...], ...]
    scenarios: tuple[Scenario, ...]
    seeds: tuple[int, ...]
    steps: int = STEPS

    @property
    def runs(self) -> int:
        return len(self.settings) * len(self.scenarios) * len(self.seeds)

    def file(self, folder: Path, scenario: Scenario) -> Path:
        names = (self.phase, self.setup.name, self.rule.name, scenario.name)
        return folder / ("--".join(names).replace(" ", "_") + ".json")


def train(task: Task, folder: Path) -> Iterator[str]:
    """Trains what is not on disk yet; yields a line per cell."""
    program: Any = None
    for scenario in task.scenarios:
        file = task.file(folder, scenario)
        if load(task, folder, scenario) is not None:
            yield f"{file.stem}: there already"
            continue
        args = _arguments(task, scenario)
        if program is None:
            program = new_run(task.setup, task.rule).lower(*args).compile()
        outcome = jax.tree.map(np.asarray, program(*args))
        cell = {"key": _key(task, scenario), "runs": _numbers(task, scenario, outcome)}
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(cell))
        partial.replace(file)
        yield f"{file.stem}: {len(task.settings) * len(task.seeds)} runs"


def load(task: Task, folder: Path, scenario: Scenario) -> list[dict[str, Any]] | None:
    """The numbers of each setting of a cell; None if it was not trained."""
    file = task.file(folder, scenario)
    if not file.exists():
        return None
    cell = json.loads(file.read_text())
    return cell["runs"] if cell["key"] == _key(task, scenario) else None


def _key(task: Task, scenario: Scenario) -> list[Any]:
    """What the numbers of a cell depend on, as JSON gives it back."""
    values = [list(map(float, setting)) for setting in task.settings]
    described = repr(task.setup), repr(scenario)
    return [values, list(task.seeds), task.steps, *described]


_corpus = functools.cache(load_corpus)


@functools.lru_cache(maxsize=16)
def _data(
    scenario: Scenario, batch: int, length: int, seeds: tuple[int, ...], steps: int
) -> Data:
    """The same for every rule, model and optimizer."""
    sizes = batch, length, steps
    runs = [make(scenario, _corpus(), seed, *sizes) for seed in seeds]
    return Data(*(np.stack(arrays) for arrays in zip(*runs, strict=True)))


def _arguments(task: Task, scenario: Scenario) -> tuple[Any, ...]:
    setup, seeds = task.setup, task.seeds
    models = [setup.model(seed)[1] for seed in seeds]
    params = jax.tree.map(lambda *leaves: np.stack(leaves), *models)
    data = _data(scenario, setup.batch, setup.length, seeds, task.steps)
    return np.array(task.settings, np.float32), params, data


def _numbers(task: Task, scenario: Scenario, outcome: Any) -> list[dict[str, Any]]:
    """Per setting: each number by seed, and the losses step by step."""
    clean = np.array([scenario.kind(step) == "clean" for step in range(task.steps)])
    found = []
    for losses, clipped, validation in zip(*outcome, strict=True):
        rows = [_of_run(own, clean, scenario) for own in losses]
        found.append(
            {
                "validation": [_known(v) for v in validation],
                **{key: [row[key] for row in rows] for key in rows[0]},
                "clip_rate": np.mean(clipped, axis=1).astype(float).tolist(),
                "losses": np.round(_cut(losses), 3).tolist(),
            }
        )
    return found


def _of_run(
    losses: np.ndarray, clean: np.ndarray, scenario: Scenario
) -> dict[str, Any]:
    losses = _cut(losses)
    window = min(50, len(losses) // 4)
    score, _, z = spike_score(losses, window, 6.0, direction="up", mask=clean)
    jumps = [
        jump(losses, event.step, event.step + event.length)
        for event in scenario.events
        # The ten losses before it must be there, and the five after it.
        if 10 <= event.step <= len(losses) - event.length - 5
    ]
    # Where the text changes, the loss jumps for everyone, and no gradient is wrong.
    calm = scenario.change is None and scenario.rewarm is None
    return {
        "jump": max(jumps) if jumps else None,
        "max_z": float(np.max(z[clean])) if calm else None,
        "spike_score": float(score) if calm else None,
    }


def _cut(losses: np.ndarray) -> np.ndarray:
    finite = np.nan_to_num(losses.astype(np.float64), nan=99.0, posinf=99.0)
    return np.minimum(finite, 99.0)


def _known(validation: Any) -> float:
    value = float(validation)
    return min(value, KNOWS_NOTHING) if np.isfinite(value) else KNOWS_NOTHING
