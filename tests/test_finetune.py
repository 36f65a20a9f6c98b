"""Fine-tuning: adapters alone are trained, and only the protected run gets through."""

import contextlib
import dataclasses
import io
import json
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigram import compiled_quickly

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import _base
import _lora
import _tuning
import finetune
from _cli import BadOption
from _config import Config
from _interrupt import Interrupt
from _job import Job, initial
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
        ("--length 64", "--length must be above the 64 bytes of the base model, got"),
        ("--rank 0", "--rank must be at least 1, got 0"),
        ("--clip zclip", "not one of adagc, agc"),
        ("--width 30", "--width must be a multiple of 8, got 30"),
        ("--floor 2", "--floor must be below 1, got 2.0"),
        ("--restart-every -1", "--restart-every must be at least 0, got -1"),
        ("--documents /no/*.txt", "--documents '/no/*.txt' fill 0 rows of 256 bytes"),
        (f"--out {__file__}", "File exists, choose another"),
    ],
)
def test_bad_arguments_say_what_is_valid(arguments, message, capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        finetune.main(["--out", str(tmp_path), *arguments.split()])
    assert message in capsys.readouterr().err.splitlines()[-1]


def toy_job():
    """Two attention matrices, larger than any adapter, whose sum shall be 3."""

    def loss_fn(params, batch):
        kernels = [part["kernel"] for part in params["attn"].values()]
        return (sum(map(jnp.mean, kernels)) - 3.0) ** 2 + 0.0 * jnp.mean(batch[0])

    attn = {name: {"kernel": jnp.full((64, 64), 0.1)} for name in "qk"}
    return Job({"attn": attn}, loss_fn, loss_fn)


def test_ctrl_c_leaves_the_adapters_of_the_steps_made(tmp_path):
    settings = _tuning.Settings(**_tuning.QUICK | {"clip": "agc", "restart_every": 9})
    job = toy_job()
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


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The folders of a short run and of its base model, and what was printed."""
    out, printed = tmp_path_factory.mktemp("finetune"), io.StringIO()
    arguments = ["--quick", "--out", str(out), "--base", str(out / "base")]
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        contextlib.redirect_stdout(printed),
        compiled_quickly(),
    ):
        finetune.main(arguments)
    return out, out / "base", printed.getvalue()


def test_only_the_protected_run_survives(quick):
    out, _, printed = quick
    summary = json.loads((out / "summary.json").read_text())
    good, bad = (summary["results"][name] for name in ("protected", "unprotected"))
    assert good["steps"] == 30
    assert good["skipped"] == 1
    assert good["held_out_loss"] < summary["held_out_loss_before"]
    assert good["norm_after_clipping"] < good["norm_at_explosion"]
    assert bad["held_out_loss"] is None
    assert bad["stopped"].startswith("stopped, the loss of step 24 is nan")
    sizes = summary["bytes"]
    assert sizes["optimizer_state"] < sizes["optimizer_state_without_lora"] / 10
    log = (out / "protected.jsonl").read_text()
    rows = [json.loads(line) for line in log.splitlines()]
    kinds = [row["batch"] for row in rows]
    assert (kinds[16], kinds[24], kinds.count("clean")) == ("exploding", "nan", 28)
    assert "skipped" in printed


def test_a_base_that_is_there_is_used_as_it_is(quick, monkeypatch):
    _, folder, printed = quick
    monkeypatch.setattr(_base, "_trained", None)
    # Of another shape, which is for a base that is yet to be trained.
    own = _tuning.Settings().base_config
    found = [
        _base.new_base(str(path), own, 48, new_console(), Interrupt())
        for path in (folder, folder / "checkpoints" / "adagc-ema")
    ]
    for base in found:
        assert str(base).startswith("base model: llama, 1 layers of width 32, 40 steps")
        assert " ".join(str(base).split()[:6]) in printed
        start = jax.tree.leaves(base.job.initial)
        trained = jax.tree.leaves(base.params)
        assert all(np.any(a != b) for a, b in zip(start, trained, strict=True))
    assert jax.tree.all(jax.tree.map(np.array_equal, *(b.params for b in found)))
    with pytest.raises(BadOption, match="above the 32 bytes of the base model, got 32"):
        _base.new_base(str(folder), own, 32, new_console(), Interrupt())


def test_a_folder_that_is_no_base_is_refused(tmp_path):
    assert _base.find("") is _base.find(str(tmp_path / "new")) is None
    (tmp_path / "something.txt").touch()
    with pytest.raises(BadOption, match="has no checkpoints"):
        _base.find(str(tmp_path))
    for name in ("adagc", "none"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    with pytest.raises(BadOption, match=r"several base models, give one: .*adagc, "):
        _base.find(str(tmp_path))


def test_scanned_layers_of_a_base_are_taken_apart():
    one = Config(width=8, heads=1, kv_heads=1, hidden=4, scan_layers=True)
    apart = jax.eval_shape(lambda: _base._unstacked(initial(one), one.layers))
    other = dataclasses.replace(one, scan_layers=False)
    assert apart == jax.eval_shape(lambda: initial(other))
    numbers = _base._unstacked({"layers": {"w": jnp.arange(6.0).reshape(2, 3)}}, 2)
    np.testing.assert_array_equal(numbers["layers"][1]["w"], [3.0, 4.0, 5.0])


def test_a_base_of_other_options_is_not_taken_silently(tmp_path):
    own = dataclasses.replace(_tuning.Settings().base_config, seed=1)
    saved = dataclasses.asdict(dataclasses.replace(own, seed=0))
    with pytest.raises(BadOption, match=r"of which --seed was 0 and is 1: give the"):
        _base.check_own(saved, own, tmp_path)
    _base.check_own(saved | {"seed": 1}, own, tmp_path)
