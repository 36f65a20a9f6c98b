"""The benchmarks in small: what is measured, merged, fitted, judged and rendered."""

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import _aot_tables
import _pretrain_tables
import _steps
import _targets
import linearity
import models
import render
import step_time

BENCHMARKS = step_time.RESULTS.parents[1]
ROW = {"ratio": 1.0, "quartiles": [1.0, 1.0], "compile_s": 1.0}


@pytest.fixture(scope="module")
def raced() -> dict[str, Any]:
    grads = {"a": jnp.ones((8,)), "b": jnp.ones((4, 2))}
    names = ("none", "adagc + clip_metrics", _steps.GUARDED)
    with (
        pytest.MonkeyPatch.context() as patch,
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        patch.setattr(_steps, "CALLS", 2)
        optimizers = {name: _steps.adamw_after(name, {}) for name in names}
        return _steps.race(optimizers, grads, rounds=2)


def test_every_contestant_has_every_number(raced: dict[str, Any]) -> None:
    assert list(raced) == ["none", "adagc + clip_metrics", _steps.GUARDED]
    for row in raced.values():
        low, high = row["quartiles"]
        assert 0 < low <= row["ratio"] <= high
        assert row["dispatch_us"] > 0
    counts = [row["instructions"] for row in raced.values()]
    assert counts[0] < counts[1] < counts[2]
    assert raced["none"]["state_arrays"] < raced[_steps.GUARDED]["state_arrays"]


class Scripted:
    """A contestant that takes as long as it is told, and notes its turns."""

    def __init__(self, name: str, slowness: float, turns: list[str]):
        self.name, self.slowness, self.turns = name, slowness, turns
        self.seconds: list[float] = []

    def take_over(self, other: Any) -> None:
        assert not self.turns or other.name == self.turns[-1]

    def run(self) -> None:
        self.turns.append(self.name)
        # The machine gets slower and slower.
        self.seconds.append(self.slowness * 1.01 ** len(self.turns))

    def program(self) -> dict[str, Any]:
        return {}


def test_each_is_compared_with_none_beside_it() -> None:
    turns: list[str] = []
    slow = {"none": 1.0, "a": 2.0, "b": 3.0}
    scripted: Any = {name: Scripted(name, s, turns) for name, s in slow.items()}
    rows = _steps.interleaved(scripted, rounds=8)
    pairs = [tuple(turns[start : start + 2]) for start in range(0, len(turns), 2)]
    rounds = [tuple(pairs[start : start + 3]) for start in range(0, 27, 3)]
    members = [["a", "none"], ["b", "none"], ["none", "none"]]
    assert all(sorted(map(sorted, pairs)) == members for pairs in rounds)
    assert len(set(rounds)) > 3
    # Twice as slow all the same, whether it runs before or after: up to one turn.
    for name, row in rows.items():
        assert slow[name] / 1.02 < row["ratio"] < slow[name] * 1.02


def test_parameters_and_moments_are_handed_on() -> None:
    grads = {"a": jnp.ones((8,)), "b": jnp.ones((4, 2))}
    with jax.numpy_dtype_promotion("standard"):
        first, second = (
            _steps.Contestant(_steps.adamw_after(name, {}), grads)
            for name in ("adagc", _steps.GUARDED)
        )
        first.run()
        second.take_over(first)
        (old,) = adam_states(first.state)
        (new,) = adam_states(second.state)
        chex.assert_trees_all_equal(new.mu, old.mu)
        chex.assert_trees_all_equal(new.nu, old.nu)
        assert second.params is first.params
        second.run()
    (newer,) = adam_states(second.state)
    assert int(newer.count) == 2, "its own count, not the other's"


def adam_states(state: Any) -> list[optax.ScaleByAdamState]:
    kind = optax.ScaleByAdamState
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kind))
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def test_results_of_other_trees_stay() -> None:
    def entry(model: str, **more: Any) -> dict[str, Any]:
        return {"model": model, "layers": "stacked", "gradients": "float32"} | more

    old = [entry("80M", rows=1, torch=2), entry("300M", rows=3)]
    merged = step_time.merged(old, entry("80M", rows=4))
    assert merged == [entry("80M", rows=4, torch=2), entry("300M", rows=3)]
    merged = step_time.merged(old, entry("300M", torch=5))
    assert merged[1] == entry("300M", rows=3, torch=5)
    assert step_time.merged(old, entry("10M", rows=6))[0] == entry("10M", rows=6)


def test_fits_find_lines_and_powers() -> None:
    sizes = [100, 200, 400, 800]
    line = linearity.fit([(n, 2e-3 * n) for n in sizes])
    assert line["slope"] == pytest.approx(2e-3)
    assert line["intercept"] == pytest.approx(0.0, abs=1e-9)
    assert (line["r2"], line["exponent"]) == (1.0, 1.0)
    square = linearity.fit([(n, 1e-6 * n**2) for n in sizes])
    assert square["exponent"] == 2.0
    assert square["r2"] < 0.97


@pytest.mark.parametrize(
    ("ratio", "quartiles", "wanted"),
    [
        (1.15, [1.1, 1.2], "met"),
        (1.2, [1.1, 1.3], "within the spread"),
        (1.3, [1.25, 1.4], "**not met**"),
    ],
)
def test_targets_are_judged(ratio: float, quartiles: Any, wanted: str) -> None:
    rows = {
        _targets.ADAGC: ROW | {"ratio": ratio, "quartiles": quartiles},
        _targets.OPTAX: ROW | {"ratio": 1.6},
    }
    table = {"model": "80M", "layers": "stacked", "gradients": "float32", "rows": rows}
    said = {row[0]: row for row in _targets.step_rows([table])}
    assert said["adagc / AdamW alone"][-1] == wanted
    less = said["overhead of optax's clip / that of adagc"]
    assert less[2] == "≥ 2.50"
    assert float(less[3]) == pytest.approx(0.6 / (ratio - 1), abs=0.01)
    assert (less[-1] == "met") == (ratio < 1.24)


def test_a_power_above_one_misses_its_target() -> None:
    found = {"parameters": {"exponent": 1.0}, "leaves": {"exponent": 1.5}}
    rows = list(_targets.linear_rows({"methods": {"adagc": found}}))
    assert [row[-1] for row in rows] == ["met", "**not met**"]


@pytest.fixture(scope="module")
def made() -> dict[Path, str]:
    """What `render.py` would write."""
    readme = render.README.read_text()
    return {
        render.README: render.rendered(readme),
        render.DETAILS: render.details(readme),
    }


def test_what_is_written_is_what_would_be_written(made: dict[Path, str]) -> None:
    for path, text in made.items():
        assert path.read_text() == text, path


@pytest.mark.parametrize("name", list(render.TABLES))
def test_every_table_stands_once(name: str, made: dict[Path, str]) -> None:
    table = render.TABLES[name]()
    assert sum(text.count(table) for text in made.values()) == 1
    caption = table.split("\n\n")[0]
    if any(part in name for part in ("step_time", "aot", "targets", "torch", "linear")):
        assert caption.startswith(("Measured", "Estimates", "Not measured yet"))


def test_a_changed_number_and_an_unknown_place_are_seen(made: dict[Path, str]) -> None:
    readme = made[render.README]
    changed = readme.replace("| none | 1.0", "| none | 7.0")
    assert changed != readme
    assert render.rendered(changed) == readme
    with pytest.raises(ValueError, match="no table"):
        render.rendered(
            readme.replace("begin: aot -->", "begin: aut -->").replace(
                "end: aot -->", "end: aut -->"
            )
        )
    with pytest.raises(ValueError, match="have an end"):
        render.rendered(readme.replace("<!-- end: aot -->", ""))


def test_shapes_of_real_models() -> None:
    billions = {
        "Llama-2 7B": 6.74,
        "Llama-2 70B": 68.98,
        "Mixtral 8x7B": 46.70,
        "Qwen3-1.7B": 1.72,
        "ERNIE-like 10B": 10.4,
    }
    for name, wanted in billions.items():
        for stacked in (False, True):
            model = models.MODELS[name]
            shapes, axes = model.shapes(stacked), model.axes(stacked)
            leaf: Any = {"is_leaf": lambda x: isinstance(x, tuple)}
            assert jax.tree.map(len, shapes, **leaf) == jax.tree.map(len, axes, **leaf)
            count = sum(map(math.prod, jax.tree.leaves(shapes, **leaf)))
            assert count / 1e9 == pytest.approx(wanted, rel=5e-3)


def test_parts_without_their_environment_say_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = importlib.import_module("all")
    parts = {
        "lacks": everything.Part(BENCHMARKS / "none.py", (), ("no_such|nor_this",)),
        "starts": everything.Part(BENCHMARKS / "no_such_script.py"),
    }
    monkeypatch.setattr(everything, "PARTS", parts)
    assert everything.run(["lacks", "starts"], {"starts": sys.executable}) == ["starts"]
    said = capsys.readouterr().out
    assert "lacks: skipped, no no_such or nor_this" in said
    assert "starts: failed" in said
    assert "cannot start" in everything.why_not(parts["starts"], "/no/such/python")


def test_one_command_knows_every_script() -> None:
    scripts = {part.script for part in importlib.import_module("all").PARTS.values()}
    assert all(script.exists() for script in scripts)


def test_estimates_name_collectives_that_are_not_all_reduces() -> None:
    base = {"hbm_bytes": 100, "collectives": []}
    row = {"hbm_bytes": 110, "collectives": [["all-gather", 1, 8, ["fsdp"]]]}
    text = _aot_tables._added({"none": base, "x": row}, "x")
    assert text == "1.100; **all-gather** 8 B over fsdp"


def test_a_run_that_stopped_is_beaten() -> None:
    def clipper(losses: list[float | None]) -> dict[str, Any]:
        known = any(loss is not None for loss in losses)
        spread = {"values": losses} if known else None
        return {"validation_loss": spread, "clip_rate": {"values": [0.5, 0.5]}}

    clippers = {
        "adagc": clipper([2.0, 2.0]),
        "lower": clipper([1.9, None]),
        "never": clipper([None, None]),
    }
    found = {name: _pretrain_tables._beaten(clippers, name) for name in clippers}
    assert found == {"adagc": "", "lower": "1 of 2", "never": "2 of 2"}
