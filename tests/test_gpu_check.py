"""The script for accelerators, in small on a CPU: it must work when one is there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_check.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(SCRIPT), *arguments]
    quick = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | quick
    )


def test_tiny_run_is_right_and_times_every_backend(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = run("--tiny", "--out", str(out))
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert {c["backend"] for c in report["correctness"]} == {"pallas_gpu", "pallas_tpu"}
    assert len({c["check"] for c in report["correctness"]}) == 5
    assert all(check["right"] for check in report["correctness"])
    assert all(rate > 0 for rate in report["bandwidth"]["gb_per_s"].values())
    (step,) = report["steps"]
    assert len(step["rows"]) == 7
    assert step["rows"]["none"]["ratio"] == 1


def test_time_that_is_over_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import gpu_check

    (left,) = gpu_check.steps(True, gpu_check.backends("cpu"), deadline=0.0)
    assert left["left_out"] == "the time was over"


def test_a_cpu_needs_the_tiny_run(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path / "gpu.json"))
    assert done.returncode == 2
    assert "--tiny" in done.stderr
