"""Fine-tuning: adapters alone are trained, and only the protected run gets through."""

import json
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import _lora
import _tuning
import finetune
from _job import new_job
from _report import Live, new_console

pytestmark = pytest.mark.usefixtures("optax_promotion")

PARAMS = {
    "layers": {
        0: {
            "attn": {
                "q": {"kernel": jnp.ones((4, 6))},
                "k": {"kernel": jnp.ones((4, 2))},
            },
            "mlp": {"up": {"kernel": jnp.ones((4, 8))}},
        }
    }
}


def test_new_adapters_change_nothing():
    adapters = _lora.new_adapters(PARAMS, rank=2, seed=0)
    assert sorted(adapters) == ["layers/0/attn/k", "layers/0/attn/q"]
    assert {x.shape for x in adapters["layers/0/attn/q"].values()} == {(4, 2), (2, 6)}
    merged = _lora.merged(PARAMS, adapters, 2.0)
    assert jax.tree.all(jax.tree.map(np.array_equal, merged, PARAMS))


def test_adapters_add_their_scaled_product_to_their_own_matrix():
    adapters = _lora.new_adapters(PARAMS, rank=2, seed=0)
    q = adapters["layers/0/attn/q"]
    q["b"] = jnp.full_like(q["b"], 0.5)
    merged = _lora.merged(PARAMS, adapters, 3.0)["layers"][0]
    expected = 1 + 1.5 * np.sum(np.asarray(q["a"]), axis=1, keepdims=True)
    actual = merged["attn"]["q"]["kernel"]
    np.testing.assert_allclose(actual, np.broadcast_to(expected, (4, 6)), rtol=1e-6)
    np.testing.assert_array_equal(merged["attn"]["k"]["kernel"], np.ones((4, 2)))
    np.testing.assert_array_equal(merged["mlp"]["up"]["kernel"], np.ones((4, 8)))


def test_adapters_need_attention():
    with pytest.raises(ValueError, match="params has no path like"):
        _lora.new_adapters({"mlp": jnp.ones((2, 2))}, rank=1, seed=0)


def test_documents_are_packed_end_to_end_without_the_short_ones(tmp_path):
    texts = {"a": b"x" * 130, "b": b"short", "c": b"y" * 131}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_bytes(text)
    rows = _tuning.packed_documents(str(tmp_path / "*.txt"), 10)
    assert rows.shape == (23, 11)
    assert rows.tobytes() == (texts["a"] + b"\0" + texts["c"])[:253]
    with pytest.raises(ValueError, match="fill 4 rows of 30 bytes"):
        _tuning.packed_documents(str(tmp_path / "a.txt"), 30)


def test_held_out_rows_are_not_trained_on():
    rows = np.arange(60)[:, None]
    train, held_out = _tuning.split(rows)
    assert held_out.ravel().tolist() == [0, 20, 40]
    assert len(train) == 57
    assert not set(train.ravel()) & set(held_out.ravel())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--length 64", "length must be above base_length"),
        ("--rank 0", "rank must be at least 1"),
        ("--clip zclip", "not one of adagc, agc"),
    ],
)
def test_bad_arguments_say_what_is_valid(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        finetune.main(arguments.split())
    assert message in capsys.readouterr().err


def test_ctrl_c_leaves_the_adapters_of_the_steps_made(tmp_path):
    settings = _tuning.Settings(**_tuning.QUICK | {"clip": "agc", "restart_every": 9})
    job = new_job(settings.base_config)
    rows = np.random.default_rng(0).integers(0, 256, (24, settings.length + 1))
    tuning = _tuning.Tuning(settings, job, job.initial, *_tuning.split(rows))
    optimizer = _tuning.pipeline(settings)
    asked = types.SimpleNamespace(asked=True)
    with Live(new_console(), settings.steps) as live:
        run, adapters, state = finetune.fine_tune(
            "protected", optimizer, tuning, live, asked
        )
    assert len(run.rows) == 10
    finetune.keep(run, adapters, tmp_path)
    assert len((tmp_path / "protected.jsonl").read_text().splitlines()) == 10
    kept = np.load(tmp_path / "protected.npz")
    for path, pair in adapters.items():
        np.testing.assert_array_equal(kept[f"{path}/b"], pair["b"])
        assert np.any(kept[f"{path}/b"])
    # Nothing in the state is as large as the model.
    largest = max(x.size for x in jax.tree.leaves(tuning.adapters))
    assert all(x.size <= max(largest, 128) for x in jax.tree.leaves(state))


def test_only_the_protected_run_survives(tmp_path, capsys):
    finetune.main(["--quick", "--out", str(tmp_path)])
    summary = json.loads((tmp_path / "summary.json").read_text())
    good, bad = (summary["results"][name] for name in ("protected", "unprotected"))
    assert good["steps"] == 30
    assert good["skipped"] == 1
    assert good["held_out_loss"] < summary["held_out_loss_before"]
    assert good["norm_after_clipping"] < good["norm_at_explosion"]
    assert bad["held_out_loss"] is None
    assert bad["stopped"].startswith("stopped, the loss of step 24 is nan")
    sizes = summary["bytes"]
    assert sizes["optimizer_state"] < sizes["optimizer_state_without_lora"] / 10
    log = (tmp_path / "protected.jsonl").read_text()
    rows = [json.loads(line) for line in log.splitlines()]
    kinds = [row["batch"] for row in rows]
    assert (kinds[16], kinds[24], kinds.count("clean")) == ("exploding", "nan", 28)
    assert "skipped" in capsys.readouterr().out
