"""The script for accelerators, in small on a CPU: it must work when one is there."""

import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_check.py"
sys.path.insert(0, str(SCRIPT.parent))

report_of = importlib.import_module("_gpu_report")
steps_of = importlib.import_module("_gpu_steps")
gpu_check = importlib.import_module("gpu_check")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(SCRIPT), *arguments]
    quick = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | quick
    )


def test_tiny_run_is_right_and_times_every_backend(tmp_path: Path) -> None:
    out = tmp_path / "results" / "gpu.json"
    done = run("--tiny", "--out", str(out))
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert {"driver", "runtime", "started", "date", "device"} <= set(report)
    assert {"jax", "jaxlib", "optax"} <= set(report["versions"])
    assert {c["backend"] for c in report["correctness"]} == {"pallas_gpu", "pallas_tpu"}
    assert len({c["check"] for c in report["correctness"]}) == 5
    assert all(check["right"] for check in report["correctness"])
    assert len(report["bandwidth"]) == 7
    assert all(entry["gb_per_s"] > 0 for entry in report["bandwidth"])
    (step,) = report["steps"]
    assert len(step["rows"]) == 7
    assert step["rows"]["none"]["ratio"] > 0
    # A line for every measurement, when it was made.
    lines = len(report["correctness"]) + len(report["bandwidth"]) + 1
    assert len(done.stdout.splitlines()) == lines


def broken(*_: Any) -> Any:
    raise RuntimeError("no such instruction")


def test_what_fails_is_written_and_the_rest_goes_on(tmp_path: Path) -> None:
    journal = report_of.Journal(tmp_path / "gpu.json", seconds=60.0)
    wrong = {"apart": 1.0, "right": False}
    pending = [
        ({"check": "a"}, broken),
        ({"check": "b"}, lambda: wrong),
        ({"check": "c"}, lambda: {"right": True}),
    ]
    journal.measure("correctness", pending)
    rows = {"none": {"ms": 1.0}, "adagc": {"error": "RuntimeError: in a step"}}
    journal.measure("steps", [({"model": "tiny"}, lambda: {"rows": rows})])
    first, second, third = json.loads((tmp_path / "gpu.json").read_text())[
        "correctness"
    ]
    assert first == {"check": "a", "error": "RuntimeError: no such instruction"}
    assert second == {"check": "b", **wrong}
    assert third == {"check": "c", "right": True}
    failures = "\n".join(journal.failures())
    assert len(journal.failures()) == 3
    assert "no such instruction" in failures
    assert "in a step" in failures


def test_a_contestant_that_fails_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain: Any = optax.sgd(1.0)
    optimizers = {
        "none": plain,
        "no program": plain._replace(update=broken),
    }
    ready, errors = steps_of.compiled(optimizers, {"w": jnp.ones(3)})
    assert list(ready) == ["none"]
    assert errors == {"no program": {"error": "RuntimeError: no such instruction"}}
    monkeypatch.setattr(steps_of.Timed, "run", broken)
    assert set(steps_of.compiled(optimizers, {"w": jnp.ones(3)})[1]) == {*optimizers}


def test_memory_and_time_that_are_not_there_are_said(tmp_path: Path) -> None:
    gib = 1 << 30
    assert steps_of.fitting(10**9, 100 * gib) == 7
    assert steps_of.fitting(10**9, 10 * gib) == 0
    assert steps_of.fitting(10**9, 0) >= 7
    journal = report_of.Journal(tmp_path / "gpu.json", seconds=1e-6)
    named = gpu_check.backends("gpu")
    journal.measure("steps", steps_of.steps(named, tiny=False))
    left = {entry["left_out"] for entry in journal.report["steps"]}
    assert left == {"the time was over"}
    assert {e["model"] for e in journal.report["steps"]} == {"80M", "300M", "1B", "2B"}
    assert not journal.failures()
    # A measurement as long as the last one of its kind would not end in time.
    journal = report_of.Journal(tmp_path / "gpu.json", seconds=60.0)
    journal.longest["steps", "stacked"] = 61.0
    run = functools.partial(dict, done=True)
    kinds = [({"layers": kind}, run) for kind in ("stacked", "unrolled")]
    journal.measure("steps", kinds)
    assert [set(entry) for entry in journal.report["steps"]] == [
        {"layers", "left_out"},
        {"layers", "done"},
    ]


def test_a_cpu_needs_the_tiny_run(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path / "gpu.json"))
    assert done.returncode == 2
    assert "--tiny" in done.stderr
