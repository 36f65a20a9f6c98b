"""The main example: a whole run, and its pieces."""

import contextlib
import dataclasses
import importlib
import io
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bigram import EXAMPLES, compiled_quickly, new_job, write_data
from flax import nnx
from rich.console import Console

import adagc_jax

analysis = importlib.import_module("_analysis")
cli = importlib.import_module("_cli")
clippers = importlib.import_module("_clippers")
config = importlib.import_module("_config")
data = importlib.import_module("_data")
model = importlib.import_module("_model")
optimizers = importlib.import_module("_optimizers")
pretrain = importlib.import_module("pretrain")
train = importlib.import_module("_trainer")
report = importlib.import_module("_report")


SMALL = "--layers 1 --width 16 --heads 2 --kv-heads 2 --hidden 8 --length 8"


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    """The folder and the standard output of `pretrain.py --quick`, made smaller."""
    out = tmp_path_factory.mktemp("pretrain") / "new" / "folder"
    printed = io.StringIO()
    # optax.adamw itself relies on implicit promotion.
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        contextlib.redirect_stdout(printed),
        compiled_quickly(),
    ):
        pretrain.main(["--quick", *SMALL.split(), "--out", str(out)])
    return out, printed.getvalue()


def rows(folder, name):
    lines = (folder / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_quick_run_prints_data_progress_table_and_reading(quick_run):
    out, printed = quick_run
    for expected in (
        "sha256",
        "held out",
        "hardware:",
        "loss",
        "s left",
        "max z,",
        "clips most",
    ):
        assert expected in printed
    summary = json.loads((out / "summary.json").read_text())
    # The console wraps the reading, so compare it without white space.
    assert "".join(summary["reading"].split()) in "".join(printed.split())
    assert "\x1b" not in printed


def test_quick_run_writes_every_step_of_every_clipper(quick_run):
    out, _ = quick_run
    steps = config.QUICK["steps"]
    for name in ("none", "global", "adagc"):
        log = rows(out, name)
        assert [row["step"] for row in log] == list(range(steps))
        assert all(row["clip/norm_before"] > 0 for row in log)
    kinds = [row["batch"] for row in rows(out, "adagc")]
    assert kinds.count("random") == kinds.count("xor") == 5


def test_clippers_start_alike_and_see_the_same_batches(quick_run):
    out, _ = quick_run
    results = json.loads((out / "summary.json").read_text())["results"]
    assert len({result["batches_sha256"] for result in results.values()}) == 1
    assert len({rows(out, name)[0]["loss"] for name in results}) == 1
    assert len({rows(out, name)[0]["clip/norm_before"] for name in results}) == 1


def test_none_clips_nothing_and_global_keeps_its_limit(quick_run):
    out, _ = quick_run
    for row in rows(out, "none"):
        assert row["clip/norm_after"] == row["clip/norm_before"]
        assert row["clip/fraction_clipped"] == 0
    assert max(row["clip/norm_after"] for row in rows(out, "global")) < 1 + 1e-5
    assert any(row["clip/fraction_clipped"] > 0 for row in rows(out, "global"))


def test_adagc_logs_a_scale_per_tensor(quick_run):
    out, _ = quick_run
    log = rows(out, "adagc")
    scales = {k: [row[k] for row in log] for k in log[0] if k.endswith("/scale")}
    run = analysis.Run("adagc", log)
    assert "layers/0/attn/q/kernel" in run.tensors
    assert len(run.tensors) == 12
    assert all(0 < scale <= 1 for series in scales.values() for scale in series)
    assert len({series[30] for series in scales.values()}) > 5


def test_summary_and_picture(quick_run):
    out, _ = quick_run
    summary = json.loads((out / "summary.json").read_text())
    assert summary["config"]["steps"] == config.QUICK["steps"]
    assert summary["versions"]["jax"] == jax.__version__
    for result in summary["results"].values():
        assert 1 < result["validation_loss"] < np.log(256)
        assert set(result["jumps"]) == {"random@25", "xor@42"}
        assert result["ms_per_step"] > 0
    png = (out / "pretrain.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) > 20_000


def test_batch_is_a_pure_function_of_seed_and_step():
    text = np.arange(10_000, dtype=np.int64).astype(np.uint8)
    shape = {"batch_size": 4, "length": 16}
    first = data.train_batch(text, seed=1, step=7, **shape)
    again = data.train_batch(text, seed=1, step=7, **shape)
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first[0][:, 1:], first[1][:, :-1])
    for seed, step in ((1, 8), (2, 7)):
        other = data.train_batch(text, seed=seed, step=step, **shape)
        assert not np.array_equal(first[0], other[0])


def test_corruptions_do_what_they_say():
    text = np.arange(10_000, dtype=np.int64).astype(np.uint8)
    shape = {"seed": 0, "step": 3, "batch_size": 4, "length": 16}
    inputs, targets = data.train_batch(text, **shape)
    xor_inputs, xor_targets = data.train_batch(text, kind="xor", **shape)
    assert len(np.unique([xor_inputs ^ inputs, xor_targets ^ targets])) == 1
    same, shifted = data.train_batch(text, kind="labels", **shape)
    np.testing.assert_array_equal(same, inputs)
    np.testing.assert_array_equal(np.sort(shifted), np.sort(targets))
    assert not np.array_equal(shifted, targets)
    noise, _ = data.train_batch(text, kind="random", **shape)
    assert noise.dtype == inputs.dtype
    assert not np.array_equal(noise, inputs)


def test_bursts_leave_the_other_batches_alone():
    corpus = data.Corpus("x", 1, "", np.arange(9_999, dtype=np.uint16), np.zeros(0))
    with_bursts = config.Config()
    without = dataclasses.replace(with_bursts, bursts=())
    assert [with_bursts.kind(s) for s in (119, 120, 124, 125)] == [
        "clean",
        "random",
        "random",
        "clean",
    ]
    for step in (119, 125, 300):
        same = np.array_equal(
            with_bursts.batch(corpus, step), without.batch(corpus, step)
        )
        assert same == (step != 300)


def test_corpus_is_sorted_split_and_identified(tmp_path):
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "left_out.py").write_text("left out")
    for i in range(21):
        (tmp_path / f"m{i:02}.py").write_text(f"<{i}>")
    corpus = data.load_corpus(str(tmp_path))
    assert corpus.files == 21
    assert corpus.validation.tobytes() == b"<0><20>"
    assert corpus.train.tobytes().startswith(b"<1><2><3>")
    assert data.load_corpus(str(tmp_path)).sha256 == corpus.sha256
    with pytest.raises(ValueError, match="two files at least"):
        data.load_corpus(str(tmp_path / "test"))


def test_decoder_is_causal_and_shares_key_value_heads():
    decoder = model.Decoder(
        layers=2, width=16, heads=4, kv_heads=2, hidden=24, rngs=nnx.Rngs(0)
    )
    assert decoder.layers[0].attn.q.kernel.shape == (16, 16)
    assert decoder.layers[0].attn.k.kernel.shape == (16, 8)
    tokens = jnp.arange(10, dtype=jnp.int32)[None, :]
    changed = tokens.at[0, 6].set(99)
    forward = jax.jit(lambda tokens: decoder(tokens))
    before, after = forward(tokens), forward(changed)
    np.testing.assert_allclose(before[:, :6], after[:, :6], atol=1e-6)
    assert (jnp.abs(before - after)[0, 6:].max(axis=-1) > 1e-4).all()


def test_rotary_scores_depend_on_distance_only():
    x = jax.random.normal(jax.random.key(0), (1, 1, 1, 8))
    turned = model.rotary(jnp.broadcast_to(x, (1, 12, 1, 8)))[0, :, 0]
    scores = turned @ turned.T
    for distance in (1, 5):
        diagonal = jnp.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4)


def run_of(losses, corrupted=(), **result):
    log = [
        {
            "step": step,
            "batch": "random" if step in corrupted else "clean",
            "loss": loss,
            "clip/fraction_clipped": 0.5,
        }
        for step, loss in enumerate(losses)
    ]
    return analysis.Run("made-up", log, **result)


def test_jump_is_measured_around_the_burst():
    losses = [2.0] * 20 + [9.0] * 5 + [2.5, 3.5, 2.5, 2.0, 2.0, 8.0] + [2.0] * 9
    run = run_of(losses, corrupted=range(20, 25))
    burst = data.Burst("random", 20)
    assert analysis.jumps(run, [burst], 5) == {"random@20": 1.5}
    assert analysis.jumps(run, [data.Burst("xor", 34)], 5) == {}


def test_summary_of_a_run_counts_clean_steps_only():
    noise = np.random.default_rng(0).normal(2.0, 0.1, 100)
    losses = noise.copy()
    losses[50:55] = 50.0
    losses[80] = 6.0
    settings = config.Config(
        steps=100, window=30, bursts=(data.Burst("random", 50),), log_every=1
    )
    result = analysis.summarise(run_of(losses, corrupted=range(50, 55)), settings)
    assert result["spike_score_percent"] == pytest.approx(100 / 95)
    assert 20 < result["max_z"] < 60
    assert result["clip_rate"] == 0.5
    assert abs(result["jumps"]["random@50"]) < 0.4
    assert result["jitter"] > 0


def test_reading_follows_the_numbers():
    def result(validation_loss, jump, clip_rate):
        return {
            "validation_loss": validation_loss,
            "jumps": {"random@20": jump},
            "jitter": 0.2,
            "clip_rate": clip_rate,
        }

    good, bad = result(1.5, 0.1, 0.3), result(1.75, 2.0, 0.1)
    one = analysis.reading({"a": good, "b": bad})
    other = analysis.reading({"a": bad, "b": good})
    assert "a has the lowest validation loss, 0.250 below b." in one
    assert "is 2.00 with b and 0.10 with a; 95 %" in one
    assert "b has the lowest validation loss, 0.250 below a." in other
    assert "b clips most, 30 %" in other
    assert "Fewer than two" in analysis.reading({"a": result(None, 0.1, 0.0)})
    # In a short run no place is undisturbed for long enough.
    short = {"a": good | {"jitter": None}, "b": bad | {"jitter": None}}
    assert "is 2.00 with b and 0.10 with a. a clips most" in analysis.reading(short)


def parse(*arguments):
    return cli.parse_config(
        config.Config, description="", quick=config.QUICK, arguments=arguments
    )


def test_command_line_sets_every_field(capsys):
    assert parse() == config.Config()
    assert parse("--quick") == config.Config(**config.QUICK)
    assert parse("--quick", "--steps", "99").steps == 99
    assert parse("--clip", "adagc, zclip").clip == ("adagc", "zclip")
    assert parse("--clip", "adagc(beta=.9, eps=0),none").clip == (
        "adagc(beta=.9,eps=0)",
        "none",
    )
    assert parse("--guard").guard
    assert parse("--bursts", "labels@50").bursts == (data.Burst("labels", 50),)
    with pytest.raises(SystemExit, match="0"):
        parse("--help")
    shown = capsys.readouterr().out
    for field in dataclasses.fields(config.Config):
        assert "--" + field.name.replace("_", "-") in shown


BAD = {
    "--clip adagc,adagcc": "'adagcc'; valid names are none, global, value",
    "--clip adagc,adagc": "given twice",
    "--clip adagc(lamda=1.1)": "argument 'lamda'; it has lambda_rel, beta",
    "--clip adagc(beta=2)": "clip 'adagc(beta=2)': beta must be in [0.0, 1.0)",
    "--clip adagc(1.1)": "give its options by name",
    "--clip none(x=1": "clip 'none(x=1'",
    "--bursts noise@50": "valid kinds are random, xor, labels",
    "--bursts xor@359": "--bursts xor@359 needs ten steps before it",
    "--steps 0": "--steps must be at least 1, got 0",
    "--steps 1e3": "argument --steps: invalid int value: '1e3'",
    "--step 5": "unrecognized arguments: --step 5",
    "--length 2": "--length must be at least 3, got 2",
    "--peak-lr nan": "--peak-lr must be above 0, got nan",
    "--b2 1": "--b2 must be below 1, got 1.0",
    "--seeds 0": "--seeds must be at least 1, got 0",
    "--seed -1": "--seed must be at least 0, got -1",
    "--rollback -1": "--rollback must be at least 0, got -1",
    "--rollback 9 --checkpoint-every 5": "keeps its snapshots in memory",
    "--model bert": "'bert' is not one of llama, qwen, mixtral",
    "--model mixtral --experts 1": "--experts must be at least 2, got 1",
    "--experts 8": "--experts is read with --model mixtral only",
    "--optimizer lion --eps 1e-6": "--optimizer adamw or muon only: 1e-06 would change",
    "--clip adagc-global --max-norm 2": "--max-norm is read with --clip global or",
    "--heads 3": "--heads must be a multiple of --kv-heads",
    "--mesh rows=2": "'rows=2' is not AXIS=SIZE",
    "--mesh fsdp=3": "a batch by 3, which does not divide --batch-size 16",
    "--mesh expert=2": "splits experts, and --model llama has none",
    "--data /no/such/folder": "--data must be a folder",
    "--distributed here": "'here' is not auto, nor HOST:PORT,PROCESSES,INDEX",
    "--distributed a:1,2,2": "with an index from 0 and below the number",
    "--distributed a:1,2,0": "needs a mesh over the devices of all processes",
    "--distributed a:1,2,0 --mesh fsdp=2 --resume": "leaves no checkpoint",
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_arguments_say_what_is_valid(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(*arguments.split())
    last = capsys.readouterr().err.splitlines()[-1]
    assert "error: " in last
    assert BAD[arguments] in last


@pytest.mark.parametrize("name", clippers.CLIPPERS)
def test_every_clipper_trains_one_step(name):
    # optax.adamw itself relies on implicit promotion.
    with jax.numpy_dtype_promotion("standard"):
        settings = config.Config(**config.QUICK)
        optimizer = optimizers.new_optimizer(name, settings)
        params = {"a": {"kernel": jnp.ones((4, 4))}, "b": jnp.ones(4)}
        step = train.new_train_step(
            optimizer,
            lambda p, batch: ((batch @ p["a"]["kernel"]) * p["b"][None, :]).sum(),
        )
        *_, (numbers, bad) = step(params, optimizer.init(params), jnp.ones((2, 4)))
    for key in ("clip/norm_before", "clip/norm_after", "clip/fraction_clipped"):
        assert numbers[key].shape == ()
    assert {path: bool(flag) for path, flag in bad.items()} == {
        "a/kernel": False,
        "b": False,
    }


def test_progress_on_a_terminal_shows_a_bar_with_numbers():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120)
    row = {
        "step": 4,
        "loss": 2.5,
        "clip/norm_before": 3.0,
        "clip/norm_after": 1.0,
        "clip/fraction_clipped": 1.0,
    }
    with report.Live(console, 10) as live:
        live.begin("adagc")
        live.update("adagc", row, 0.1)
    shown = stream.getvalue()
    for expected in ("adagc", "5/10", "loss 2.500", "3.00 → 1.00", "100 %"):
        assert expected in shown


@pytest.fixture
def bigram(monkeypatch, tmp_path):
    """A folder of data, on which a table of logits is trained.

    Of the corrupted batches, "labels" make the loss NaN, and "xor" teaches that every
    byte is followed by the same one.
    """

    def negative(rng, windows):
        return -1 - windows[:, :-1], windows[:, 1:]

    def one_target(rng, windows):
        return windows[:, :-1], np.full_like(windows[:, 1:], 255)

    monkeypatch.setattr(pretrain, "new_job", new_job)
    monkeypatch.setattr(pretrain, "draw", lambda *_: None)
    monkeypatch.setattr(pretrain, "check_memory", lambda *_: None)
    monkeypatch.setitem(data.CORRUPTIONS, "labels", negative)
    monkeypatch.setitem(data.CORRUPTIONS, "xor", one_target)
    return write_data(tmp_path / "data")


def train_bigram(folder, out, capsys, *arguments):
    """What was printed without line breaks, the log, and the results of one clipper."""
    arguments = ["--quick", "--clip", "none", "--data", str(folder), *arguments]
    arguments += ["--peak-lr", "0.5", "--out", str(out)]
    # optax.adamw itself relies on implicit promotion.
    with jax.numpy_dtype_promotion("standard"):
        pretrain.main(arguments)
    printed = " ".join(capsys.readouterr().out.split())
    results = json.loads((out / "summary.json").read_text())["results"]
    return printed, rows(out, "none"), results["none"]


def test_nonfinite_run_stops_and_the_others_go_on(
    bigram, tmp_path, monkeypatch, capsys
):
    broken = optax.chain(adagc_jax.global_gc(1.0), optax.scale(jnp.nan))
    monkeypatch.setitem(clippers.CLIPPERS, "value", lambda settings: broken)
    arguments = ["--quick", "--clip", "value,none", "--steps", "20", "--bursts", ""]
    # optax.adamw itself relies on implicit promotion.
    with jax.numpy_dtype_promotion("standard"):
        pretrain.main([*arguments, "--data", str(bigram), "--out", str(tmp_path)])
    printed = " ".join(capsys.readouterr().out.split())
    assert "value: stopped, the loss of step 1 is nan" in printed
    assert "came in step 1, in logits" in printed
    assert len(rows(tmp_path, "none")) == 20
    assert [row["loss"] is None for row in rows(tmp_path, "value")] == [False, True]
    results = json.loads((tmp_path / "summary.json").read_text())["results"]
    assert results["value"]["validation_loss"] is None
    assert results["none"]["validation_loss"] > 0


def test_guard_survives_nan(bigram, tmp_path, capsys):
    burst = ("--bursts", "labels@25", "--burst-length", "2")
    printed, log, result = train_bigram(bigram, tmp_path / "without", capsys, *burst)
    assert "none: stopped, the loss of step 25 is nan; the first" in printed
    assert len(log) == 26
    assert result["skipped"] is None
    printed, log, result = train_bigram(
        bigram, tmp_path / "with", capsys, *burst, "--guard"
    )
    assert [row["loss"] is None for row in log] == [s in (25, 26) for s in range(60)]
    assert [row["guard/last_reason"] for row in log[24:28]] == [0, 1, 1, 0]
    assert log[-1]["guard/skipped"] == result["skipped"] == 2
    assert log[25]["nonfinite_gradients"] == ["logits"]
    assert max(row["loss"] for row in log[27:]) < 2 < log[0]["loss"]
    assert result["validation_loss"] > 0
    assert "skipped 2" in printed
    assert "skipped: steps that the guard" in printed
    assert "roll-" not in printed


def test_guard_that_gives_up_ends_the_run(bigram, tmp_path, capsys):
    burst = ("--bursts", "labels@25", "--burst-length", "30")
    both = ("--guard", "--rollback", "5")
    printed, log, result = train_bigram(bigram, tmp_path, capsys, *burst, *both)
    assert "none: stopped, the loss of step 40 is nan, the guard gave up; " in printed
    assert len(log) == 41
    # A step that was skipped has done no harm that a rollback could undo.
    assert (result["skipped"], result["rollbacks"]) == (16, 0)


def test_rollback_goes_around_a_burst(bigram, tmp_path, capsys):
    burst = ("--bursts", "xor@25", "--burst-length", "10")
    _, log, without = train_bigram(bigram, tmp_path / "without", capsys, *burst)
    printed, new_log, result = train_bigram(
        bigram, tmp_path / "with", capsys, *burst, "--rollback", "10"
    )
    assert without["rollbacks"] is None
    assert result["rollbacks"] == 1
    event = result["rollback_events"][0]
    # The snapshot at step 20 is of the same block, and so had not settled.
    assert (event["spike"], event["back_to"]) == (25, 10)
    assert event["skipped_batches"] == [10, 35]
    assert "in step 25 spiked" in printed
    undone = [row for row in new_log if row.get("undone")]
    assert undone == [
        row | {"batch_index": row["step"], "undone": True} for row in log[10:30]
    ]
    kept = [row for row in new_log if not row.get("undone")]
    assert [row["step"] for row in kept] == list(range(60))
    assert [row["batch_index"] for row in kept] == [*range(10), *range(36, 86)]
    worst, new_worst = (
        max(row["loss"] for row in series[25:] if row["batch"] == "clean")
        for series in (log, kept)
    )
    assert new_worst < worst
    assert set(result["jumps"]) == {"xor@25"}
    assert result["jumps"]["xor@25"] < without["jumps"]["xor@25"]


def test_rollback_without_end_stops_the_run(bigram, tmp_path, capsys):
    burst = ("--bursts", "labels@25", "--burst-length", "30")
    printed, log, result = train_bigram(
        bigram, tmp_path, capsys, *burst, "--rollback", "2"
    )
    assert "none: stopped. 3 rollbacks to step" in printed
    assert result["rollbacks"] == 3
    assert log[-1]["loss"] is None


def test_sharded_shows_where_references_live_and_what_is_sent() -> None:
    script = [sys.executable, str(EXAMPLES / "sharded.py")]
    sizes = "--mesh fsdp=2,expert=2 --steps 2 --batch 4 --time 16"
    environment = os.environ | {"XLA_FLAGS": "", "COLUMNS": "120"}
    done = subprocess.run(
        [*script, *sizes.split()],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"layers/experts/up +\S (\(3, 4\)) +\S \(None, 'expert'\)", done.stdout
    )
    rows = dict(re.findall(r"│ ([a-zA-Z., _]+?) +│ (none|\d+ .*?) +│", done.stdout))
    assert rows["AdamW alone"] == rows["adagc per shard, steady phase"] == "none"
    assert "all-reduce" in rows["adagc"]
    assert not any("all-gather" in row for row in rows.values())
    bad = subprocess.run(
        [*script, "--mesh", "rows=2"], capture_output=True, text=True, check=False
    )
    assert "'rows=2' is not AXIS=SIZE" in bad.stderr
