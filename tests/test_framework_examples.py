"""The short examples: each trains through an outlier, and shows what was clipped."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "frameworks")]

pytestmark = pytest.mark.usefixtures("optax_promotion")


@pytest.mark.parametrize(
    ("script", "layer"),
    [
        ("nnx", "layers/2/kernel"),
        ("linen", "layers/2/Dense_0/kernel"),
        ("equinox", "layers/2/weight"),
        ("plain_scan", "layers/2/w"),
    ],
)
def test_learns_through_an_outlier(script, layer, capsys):
    importlib.import_module(f"{script}_train").main(["--steps", "30"])
    printed = capsys.readouterr().out
    numbers = re.search(r"loss (\S+) at first, (\S+) at last, (\S+) after", printed)
    assert numbers is not None
    first, last, after = map(float, numbers.groups())
    assert last < first
    assert after < first
    assert float(re.findall(r"clip rate ([\d.]+)", printed)[0]) > 0
    assert layer in printed


def test_two_processes_agree():
    script = str(EXAMPLES / "frameworks" / "multiprocess_train.py")
    command = [sys.executable, "-W", "error", script, "--steps", "22"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    said = re.findall(r"process (\d) of 2: loss (\S+), clip rate ([\d.]+)", done.stdout)
    assert sorted(rank for rank, *_ in said) == ["0", "1"]
    assert said[0][1:] == said[1][1:]
    assert float(said[0][2]) > 0


@pytest.mark.parametrize(
    "script", ["nnx_train", "multiprocess_train", "maxtext_train", "custom_rule"]
)
def test_help(script, capsys):
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(script).main(["--help"])
    assert f"{script}.py" in capsys.readouterr().out


def test_own_rule_holds_an_outlier(capsys):
    rule = importlib.import_module("custom_rule")
    norms, _ = rule.train(4.0, 24, 20)
    assert norms[20] < 2 * max(norms[:20])
    loose, _ = rule.train(1000.0, 24, 20)
    # Only the back-stop is left.
    assert loose[20] == pytest.approx(100.0, rel=1e-3)
    rule.main(["--steps", "22"])
    assert "1000 times larger" in capsys.readouterr().out
