"""Runs a launcher in a framework's environment, and checks AdaGC in what it logged."""

import math
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAMBDA_REL, BETA = 1.04, 0.99


def launch(python, script, arguments):
    """Runs a script of examples/frameworks on eight devices."""
    done = subprocess.run(
        [python, str(ROOT / "examples" / "frameworks" / script), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            # Most of the time goes into compiling.
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        },
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def tensors(row):
    """The names of all tensors and layers in a row of level "all"."""
    return [re.sub("^clip/|/gamma$", "", key) for key in row if key.endswith("/gamma")]


def check_totals(row, warmup):
    """Norms of tensors make up the whole, of which only the warm-up makes use."""
    norm = pytest.approx(row["clip/norm_before"], rel=1e-5)
    parts = [row[f"clip/{name}/norm_before"] for name in tensors(row)]
    assert math.hypot(*parts) == norm
    assert row["clip/norm_seen"] == (norm if row["clip/step"] <= warmup else 0.0)


def check_clipping(rows, warmup, lambda_abs):
    """The whole tree is clipped in the warm-up, and then each tensor as AdaGC says."""
    assert len(rows) > warmup
    for row in rows[:warmup]:
        assert row["clip/norm_before"] > lambda_abs
        assert row["clip/norm_after"] == pytest.approx(lambda_abs, rel=1e-5)
    clipped = [
        _is_clipped(before, row, name)
        for before, row in zip(rows[warmup - 1 :], rows[warmup:], strict=False)
        for name in tensors(row)
    ]
    assert any(clipped)


def _is_clipped(before, row, name):
    gamma, norm = before[f"clip/{name}/gamma"], row[f"clip/{name}/norm_before"]
    after = min(norm, LAMBDA_REL * gamma)
    assert row[f"clip/{name}/norm_after"] == pytest.approx(after, rel=1e-5)
    moved = BETA * gamma + (1.0 - BETA) * after
    assert row[f"clip/{name}/gamma"] == pytest.approx(moved, rel=1e-5)
    return after < norm


def check_same(rows, expected, prefixes):
    """Two runs have logged the same numbers."""
    assert [row["clip/step"] for row in rows] == [row["clip/step"] for row in expected]
    for row, other in zip(rows, expected, strict=True):
        names = [key for key in other if key.startswith(prefixes)]
        assert {key: row[key] for key in names} == pytest.approx(
            {key: other[key] for key in names}, rel=1e-5
        )
