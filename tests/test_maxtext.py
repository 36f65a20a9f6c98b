"""MaxText trains with AdaGC in front; opt-in, in an environment of its own.

ADAGC_MAXTEXT_PYTHON=mt/bin/python pytest tests/test_maxtext.py
"""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest

PYTHON = os.environ.get("ADAGC_MAXTEXT_PYTHON", "")
ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "frameworks" / "maxtext_train.py"


@pytest.mark.skipif(not PYTHON, reason="ADAGC_MAXTEXT_PYTHON is no Python with MaxText")
@pytest.mark.parametrize("scan", ["true", "false"])
@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_clip_metrics_are_in_the_log(scan, mode, tmp_path):
    log = tmp_path / "metrics.jsonl"
    settings = {
        "scan_layers": scan,
        "shard_mode": mode,
        "metrics_file": log,
        "base_output_directory": tmp_path / "out",
    }
    done = subprocess.run(
        [PYTHON, str(SCRIPT), *(f"{key}={value}" for key, value in settings.items())],
        capture_output=True,
        text=True,
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        },
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["clip/step"] for row in rows] == list(range(1, len(rows) + 1))
    assert len(rows) == 6
    assert all(math.isfinite(row["learning/loss"]) for row in rows)
    assert rows[0]["clip/norm_after"] <= rows[0]["clip/norm_before"]
    for row in rows:
        norm = pytest.approx(row["learning/grad_norm"], rel=1e-5)
        assert row["clip/norm_before"] == norm
