"""MaxText trains with AdaGC in front, is interrupted, and goes on.

Its runs are opt-in, in an environment of their own:
ADAGC_MAXTEXT_PYTHON=mt/bin/python pytest tests/test_maxtext.py
"""

import importlib
import json
import math
import os
import shutil
import sys
from types import SimpleNamespace

import pytest
from adagc_logs import ROOT, check_clipping, check_same, check_totals, launch, tensors

PYTHON = os.environ.get("ADAGC_MAXTEXT_PYTHON", "")
STEPS, SAVED, WARMUP, LAMBDA_ABS = 7, 3, 2, 0.1
LAYER = {
    "true": "decoder/layers/{}/mlp/wo/kernel",
    "false": "decoder/layers_{}/mlp/wo/kernel",
}

sys.path[:0] = [str(ROOT / "examples" / "frameworks")]


def trained(folder, log, scan, mode):
    """The rows that MaxText logs in one run, or after the last checkpoint it finds."""
    settings = {
        "scan_layers": scan,
        "shard_mode": mode,
        "metrics_file": folder / log,
        "base_output_directory": folder,
        "jax_cache_dir": folder / "cache",
        "steps": STEPS,
        "learning_rate": 1e-2,
        "enable_checkpointing": "true",
        "checkpoint_period": SAVED,
    }
    ours = ["--warmup", WARMUP, "--lambda-abs", LAMBDA_ABS, "--level", "all"]
    theirs = [f"{key}={value}" for key, value in settings.items()]
    launch(PYTHON, "maxtext_train.py", [*ours, *theirs])
    return [json.loads(line) for line in (folder / log).read_text().splitlines()]


@pytest.fixture(
    scope="module",
    params=[(scan, mode) for scan in LAYER for mode in ("auto", "explicit")],
    ids="-".join,
)
def runs(request, tmp_path_factory):
    """Whether layers are scanned, the rows of a whole run, and those of a resumed one.

    The second run finds what the first would have left if it had ended after step 3.
    """
    if not PYTHON:
        pytest.skip("ADAGC_MAXTEXT_PYTHON is no Python with MaxText")
    folder = tmp_path_factory.mktemp("maxtext")
    scan, mode = request.param
    whole = trained(folder, "whole.jsonl", scan, mode)
    checkpoints = folder / "adagc" / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"0", "3", "6"}
    shutil.rmtree(checkpoints / "6")
    return scan, whole, trained(folder, "resumed.jsonl", scan, mode)


def test_metrics_are_in_the_log(runs):
    _, rows, _ = runs
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert [row["clip/step"] for row in rows] == list(range(1, STEPS + 1))
    losses = [row["learning/loss"] for row in rows]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
    for row in rows:
        norm = pytest.approx(row["learning/grad_norm"], rel=1e-5)
        assert row["clip/norm_before"] == norm
        check_totals(row, WARMUP)


def test_every_layer_has_a_reference_of_its_own(runs):
    scan, rows, _ = runs
    layers = [f"clip/{LAYER[scan].format(layer)}/gamma" for layer in range(3)]
    assert len({rows[-1][layer] for layer in layers}) == 3
    assert len(tensors(rows[-1])) == 3 * 9 + 3


def test_it_clips_in_the_warm_up_and_after_it(runs):
    _, rows, _ = runs
    check_clipping(rows, WARMUP, LAMBDA_ABS)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(runs):
    _, whole, resumed = runs
    assert [row["step"] for row in resumed] == list(range(SAVED + 1, STEPS))
    check_same(resumed, whole[SAVED + 1 :], ("clip/", "learning/"))


def test_maxtexts_own_clipping_must_be_off():
    optimizers = SimpleNamespace(get_optimizer=lambda config: config)
    train = SimpleNamespace(train_step=lambda: None)
    importlib.import_module("maxtext_train").install(optimizers, train)
    with pytest.raises(ValueError, match="pass gradient_clipping_threshold=0"):
        optimizers.get_optimizer(SimpleNamespace(gradient_clipping_threshold=1.0))
