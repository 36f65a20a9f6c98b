"""The study in small: a cell is trained, kept and found again, and the best chosen."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "study"))

import cells
import plan
import scenarios
from ablations import ABLATIONS, SCENARIOS as ABLATED
from cells import Task
from rules import GRID, RULES, Rule
from scenarios import REPORT, TUNING, Event, Scenario
from seeds import mean_of_medians, median_with_interval, paired
from setups import VARIANTS, Setup
from train import new_run

import adagc_jax

TINY = Setup("tiny", width=16, hidden=16, experts=2, batch=2, length=16)
TROUBLE = Scenario("trouble", (Event("random", 14, 2), Event("tensor x 1000", 18, 1)))
RULE = Rule("fixed", adagc_jax.tensor_gc, ("max_norm",), ((0.5,), (1e-9,)))


@pytest.fixture(scope="module")
def task() -> Task:
    return Task("tuning", TINY, RULE, RULE.settings, (TROUBLE,), (0, 1), steps=26)


@pytest.fixture(scope="module")
def folder(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cells")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        (line,) = cells.train(task, made)
    assert line.endswith("4 runs")
    return made


def test_a_cell_is_kept_and_not_trained_again(task: Task, folder: Path) -> None:
    (line,) = cells.train(task, folder)
    assert line.endswith("there already")


def test_the_setting_that_learns_is_chosen(task: Task, folder: Path) -> None:
    learns, hardly = plan.scores(task, folder)
    assert learns < hardly - 0.1


def test_numbers_of_a_run(task: Task, folder: Path) -> None:
    learns, hardly = cells.load(task, folder, TROUBLE) or []
    assert hardly["clip_rate"] == [1.0, 1.0]
    assert all(0 < rate < 1 for rate in learns["clip_rate"])
    assert np.shape(learns["losses"]) == (2, 26)
    # Random bytes cannot be predicted; the batches around them can.
    losses = np.median(learns["losses"], axis=0)
    assert losses[14:16].min() > losses[10:14].max()


def test_other_settings_are_other_cells(task: Task, folder: Path) -> None:
    other = Task("tuning", TINY, RULE, ((0.5,),), (TROUBLE,), (0, 1), steps=26)
    assert cells.load(other, folder, TROUBLE) is None
    with pytest.raises(ValueError, match="train it first"):
        plan.scores(other, folder)


def test_a_fault_needs_its_tensor() -> None:
    with pytest.raises(ValueError, match="has no tensor"):
        new_run(Setup("one layer", layers=1), RULE)


def test_everyone_has_as_many_settings_to_choose_from() -> None:
    assert {len(rule.settings) for rule in RULES if rule.names} == {6}
    for rule in (*RULES, GRID):
        assert all(len(setting) == len(rule.names) for setting in rule.settings)
        assert len(set(rule.settings)) == len(rule.settings)


def test_the_halves_share_no_scenario_and_no_seed() -> None:
    events = [{s.events for s in half if s.events} for half in (TUNING, REPORT)]
    assert not events[0] & events[1]
    assert not set(plan.FULL.tuning_seeds) & set(plan.FULL.report_seeds)
    assert len({setup.name for setup in VARIANTS}) == len(VARIANTS)


def test_a_tensor_without_gradients() -> None:
    idle = next(s for s in ABLATED if s.events and s.events[0].kind == scenarios.IDLE)
    data = scenarios.make(idle, cells._corpus(), 0, batch=2, length=8, steps=100)
    np.testing.assert_array_equal(np.flatnonzero(data.fault == 0), np.arange(20, 80))
    np.testing.assert_array_equal(np.unique(data.loss_scale), 1)


def test_every_setting_of_the_ablations_is_another_clipper() -> None:
    found = set()
    for rule in ABLATIONS:
        for setting in rule.settings:
            clip = rule.clipper(setting, adagc_jax.per_tensor())
            assert clip.init({"w": np.ones(2)}) is not None
            found.add((rule.name, rule.describe(setting)))
    assert len(found) == sum(len(rule.settings) for rule in ABLATIONS)


def test_learning_rates() -> None:
    once = scenarios.learning_rates(100, None)
    twice = scenarios.learning_rates(100, 50)
    assert once[0] == pytest.approx(1 / 12)
    assert once.max() == 1.0
    assert once[-1] == pytest.approx(0.1)
    assert twice[49] == pytest.approx(0.1)
    assert twice[61] == 1.0
    assert len(twice) == 100


def test_intervals() -> None:
    assert median_with_interval([1.0, 1.0, 1.0]) == (1.0, 1.0, 1.0)
    middle, low, high = mean_of_medians([[1, 2, 3, 4, 5], [2, 3, 4, 5, 6]])
    assert middle == 3.5
    assert 1.5 <= low < middle < high <= 5.5
    assert paired({"x": [3.0, 4.0]}, {"x": [1.0, 1.0]}, "x") == [2.0, 3.0]
