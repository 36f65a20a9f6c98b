"""Levanter trains with AdaGC in front, ends, and goes on.

Opt-in, in an environment of its own:
ADAGC_LEVANTER_PYTHON=lev/bin/python pytest tests/test_levanter.py
"""

import json
import os

import pytest
from adagc_logs import check_clipping, check_same, check_totals, launch, tensors

PYTHON = os.environ.get("ADAGC_LEVANTER_PYTHON", "")
STEPS, WARMUP, LAMBDA_ABS = 8, 3, 0.1

pytestmark = pytest.mark.skipif(
    not PYTHON, reason="ADAGC_LEVANTER_PYTHON is no Python with Levanter"
)


def trained(out, steps, *more):
    """The rows of the clipper, and the losses, of all runs so far in `out`."""
    ours = ["--warmup", WARMUP, "--lambda-abs", LAMBDA_ABS, "--level", "all"]
    launch(PYTHON, "levanter_train.py", [*ours, "--steps", steps, "--out", out, *more])
    (log,) = out.glob("*.log")
    lines = log.read_text().splitlines()
    logged = [json.loads(x.split(" :: ")[1]) for x in lines if '"event": "log"' in x]
    metrics = [x["metrics"] for x in logged]
    # At its end a run logs its last step once more.
    losses = {x["global_step"]: x["train/loss"] for x in metrics if "train/loss" in x}
    return [x for x in metrics if "clip/step" in x], losses


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("whole"), STEPS)


def check_run(rows, losses):
    assert [row["clip/step"] for row in rows] == list(range(1, STEPS + 1))
    assert losses[STEPS - 1] < losses[0]
    for row in rows:
        check_totals(row, WARMUP)
    check_clipping(rows, WARMUP, LAMBDA_ABS)


def test_it_clips_every_layer_by_itself(whole):
    rows, losses = whole
    check_run(rows, losses)
    assert len(tensors(rows[-1])) == 3 * 9 + 3


def test_layers_that_are_not_scanned(tmp_path):
    rows, losses = trained(tmp_path, STEPS, "--unrolled")
    check_run(rows, losses)
    assert len(tensors(rows[-1])) == 3 * 9 + 3


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(whole, tmp_path):
    trained(tmp_path, STEPS // 2)
    rows, losses = trained(tmp_path, STEPS)
    assert losses == pytest.approx(whole[1], rel=1e-5)
    check_same(rows, whole[0], "clip/")
