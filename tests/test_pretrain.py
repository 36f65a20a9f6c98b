"""The main example's models, meshes, data, and what a kill or Ctrl-C leaves behind."""

import dataclasses
import gzip
import importlib
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from bigram import new_job, write_data

import adagc_jax
from adagc_jax import replay

cli = importlib.import_module("_cli")
checkpoint = importlib.import_module("_checkpoint")
clippers = importlib.import_module("_clippers")
config = importlib.import_module("_config")
data = importlib.import_module("_data")
job = importlib.import_module("_job")
memory = importlib.import_module("_memory")
mesh = importlib.import_module("_mesh")
optimizers = importlib.import_module("_optimizers")
pretrain = importlib.import_module("pretrain")
report = importlib.import_module("_report")
seeds = importlib.import_module("_seeds")
sizes = importlib.import_module("_sizes")
trainer = importlib.import_module("_trainer")

pytestmark = pytest.mark.usefixtures("optax_promotion")

TINY = {
    "batch_size": 4,
    "length": 8,
    "layers": 2,
    "width": 16,
    "heads": 2,
    "kv_heads": 2,
    "hidden": 8,
}
TOKENS = np.arange(36, dtype=np.int32).reshape(4, 9)
BATCH = TOKENS[:, :-1], TOKENS[:, 1:]
QUICKLY = {"xla_backend_optimization_level": 0}


@pytest.mark.parametrize(
    ("model", "published"),
    [("llama", 6_738_415_616), ("qwen", 8_190_735_360), ("mixtral", 46_702_792_704)],
)
def test_large_sizes_are_the_published_ones(model, published):
    shapes = sizes.size_options({"size": "7b", "model": model})
    assert job.count_parameters(config.Config(model=model, **shapes)) == published


def test_default_size_is_what_the_options_say():
    defaults = dataclasses.asdict(config.Config())
    assert sizes.SIZES["toy"]["llama"].items() <= defaults.items()
    settings = config.Config(**TINY, model="mixtral")
    params = jax.eval_shape(lambda: job.initial(settings))
    counted = job.count_parameters(settings)
    assert sum(x.size for x in jax.tree.leaves(params)) == counted


def test_scanned_layers_on_a_mesh_change_nothing():
    one = config.Config(**TINY, model="mixtral")
    scanned = dataclasses.replace(one, scan_layers=True)
    place = mesh.Placement(mesh.make_mesh(mesh.parse_mesh("fsdp=2,tensor=2,expert=2")))
    sharded = job.new_job(scanned, lambda c: place.params(lambda: job.initial(c)))
    split = {tuple(x.sharding.spec) for x in jax.tree.leaves(sharded.initial)}
    assert (None, "fsdp", "tensor") in split
    numbers = []
    for made, batch in ((job.new_job(one), BATCH), (sharded, place.batch(BATCH))):
        step = jax.jit(jax.value_and_grad(made.loss_fn), compiler_options=QUICKLY)
        loss, grads = step(made.initial, batch)
        numbers.append([float(loss), *np.asarray(grads["norm"]["scale"])])
    np.testing.assert_allclose(*numbers, rtol=1e-4, atol=1e-6)


def test_bfloat16_computes_in_it_and_keeps_float32():
    made = job.new_job(config.Config(**TINY | {"layers": 1}, dtype="bfloat16"))
    jaxpr = str(jax.make_jaxpr(made.loss_fn)(made.initial, BATCH))
    assert "bf16[4,8,16]" in jaxpr
    loss = jax.jit(made.loss_fn, compiler_options=QUICKLY)(made.initial, BATCH)
    assert loss.dtype == made.initial["norm"]["scale"].dtype == np.float32
    assert 3 < loss < 8


def test_muon_takes_matrices_and_leaves_the_rest():
    params = jax.eval_shape(
        lambda: job.initial(config.Config(**TINY, scan_layers=True, model="mixtral"))
    )
    axes = optimizers._matrices(params)
    assert axes["layers"]["mlp"]["gate"][:2] == (2, 3)
    assert axes["layers"]["attn"]["q"]["kernel"][:2] == (1, 2)
    assert axes["layers"]["attn_norm"]["scale"] is None
    assert axes["embed"]["embedding"] is axes["unembed"]["kernel"] is None


def test_a_mesh_that_does_not_divide_names_the_tensor():
    three = mesh.make_mesh(mesh.parse_mesh("tensor=3"))
    with pytest.raises(ValueError, match="tensor=3 does not divide a dimension of 256"):
        mesh.shardings(three, {"embed": {"embedding": np.zeros((256, 6))}})


@pytest.fixture
def c4(tmp_path):
    """A folder in the layout of C4, and its 40 documents."""
    folder = tmp_path / "en"
    folder.mkdir()
    texts = [f"document {i}: größer" for i in range(40)]
    for shard in range(2):
        rows = [
            {"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "http://a.b"}
            for text in texts[20 * shard : 20 * shard + 20]
        ]
        name = folder / f"c4-train.{shard:05}-of-00002.json.gz"
        with gzip.open(name, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return tmp_path, texts


def test_c4_is_packed_from_shards_and_from_the_stream(c4, monkeypatch):
    folder, texts = c4
    local = data.load_corpus(str(folder))
    held_out = texts[::20]
    assert local.validation.tobytes().decode().split("\0") == [*held_out, ""]
    trained = [text for i, text in enumerate(texts) if i % 20]
    assert local.train.tobytes().decode().split("\0") == [*trained, ""]

    def load_dataset(*which, **options):
        assert which == ("allenai/c4", "en")
        assert options == {"split": "train", "streaming": True}
        return ({"text": text} for text in texts)

    fake = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    streamed = data.load_corpus("c4")
    assert (streamed.sha256, streamed.files) == (local.sha256, 40)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(cli.BadOption, match="pip install datasets"):
        data.load_corpus("c4")


def test_files_come_from_a_pattern(tmp_path):
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(name)
    corpus = data.load_corpus(str(tmp_path / "*.txt"))
    assert corpus.validation.tobytes() == b"a.txt"
    assert corpus.train.tobytes() == b"b.txt"


@pytest.mark.parametrize(
    ("files", "source", "message"),
    [
        ({}, "*.txt", "needs two files at least, .* has 0"),
        ({"a.txt": b"", "b.txt": b""}, "*.txt", "0 bytes to train on and 0 held out"),
        ({"a.py": b"x" * 99, "b.py": b"y" * 9}, "", "9 bytes to train on and 99 held"),
        (
            {"c4-train.0.json.gz": b"no gzip"},
            "",
            r"0\.json\.gz is no gzip file of JSON",
        ),
        ({"c4-train.0.json.gz": gzip.compress(b'{"a": 1}')}, "", "KeyError: 'text'"),
    ],
)
def test_data_that_cannot_be_used_are_named(tmp_path, files, source, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(cli.BadOption, match=message):
        data.load_corpus(str(tmp_path / source)).check(9)


def test_any_bytes_are_data(tmp_path):
    content = bytes(range(256)) * 4
    for name in ("a", "b"):
        (tmp_path / f"{name}.bin").write_bytes(content)
    corpus = data.load_corpus(str(tmp_path / "*.bin"))
    corpus.check(1023)
    inputs, _ = data.train_batch(corpus.train, seed=0, step=0, batch_size=2, length=600)
    assert (inputs.min(), inputs.max()) == (0, 255)


def test_a_model_that_does_not_fit_is_refused_before_it_is_made(monkeypatch):
    settings = config.Config(**sizes.size_options({"size": "7b"}), size="7b")
    with pytest.raises(
        cli.BadOption, match=r"6,738,415,616 .* need 134\.8 GB at least"
    ):
        memory.check_memory(settings, jax.devices()[:1])
    monkeypatch.setattr(memory, "available", lambda _: 135e9)
    memory.check_memory(settings, jax.devices()[:1])


@pytest.mark.parametrize(
    ("optimizer", "module", "expected"),
    [
        ("adamw", optax, {"b2": 0.5, "eps": 0.25}),
        ("lion", optax, {"b2": 0.5}),
        ("muon", optax.contrib, {"adam_b2": 0.5, "eps": 0.25}),
    ],
    ids=["adamw", "lion", "muon"],
)
def test_options_of_the_optimizer_reach_it(optimizer, module, expected, monkeypatch):
    given = {}
    monkeypatch.setattr(module, optimizer, lambda _, **options: given.update(options))
    optimizers._descent(config.Config(optimizer=optimizer, b2=0.5, eps=0.25))
    assert expected.items() <= given.items()


def test_lion_has_a_decay_of_its_own():
    assert config.implied({"optimizer": "lion"}) == {"b2": 0.99}
    assert config.implied({"optimizer": "muon"}) == {}


# A run that is killed when it has logged step 14; its checkpoint is from step 10.
KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv.pop(1))
import bigram, _report, pretrain
pretrain.new_job = bigram.new_job
def update(self, name, row, seconds):
    if row["step"] == 14:
        os.kill(os.getpid(), signal.SIGKILL)
_report.Live.update = update
pretrain.main()
"""


@pytest.fixture
def bigram(monkeypatch, tmp_path):
    """Options of 20 steps on a table of logits, and the folder of its data."""
    monkeypatch.setattr(pretrain, "new_job", new_job)
    monkeypatch.setattr(pretrain, "draw", lambda *_: None)
    monkeypatch.setattr(pretrain, "check_memory", lambda *_: None)
    return Options(write_data(tmp_path / "data"))


class Options:
    def __init__(self, folder):
        self.folder = folder

    def __call__(self, out, *more):
        fixed = "--steps 20 --log-every 5 --length 8 --batch-size 4 --bursts"
        places = ["--data", str(self.folder), "--out", str(self.folder / out)]
        return ["--quick", *fixed.split(), "", *more, *places]


def written(folder, name):
    """The log, and the results without times."""
    result = json.loads((folder / "summary.json").read_text())["results"][name]
    del result["ms_per_step"], result["compile_seconds"]
    return (folder / f"{name}.jsonl").read_text(), result


def interrupted(monkeypatch, arguments, block=1):
    """Presses Ctrl-C in one of the blocks of steps, counted over all runs."""
    blocks = itertools.count(1)

    def update(self, name, row, seconds):
        if next(blocks) == block:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(report.Live, "update", update)
        with pytest.raises(SystemExit, match="130"):
            pretrain.main(arguments)


def refused(arguments, capsys):
    """The one line that says why."""
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        pretrain.main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_killed_and_interrupted_runs_go_on_bit_for_bit(bigram, monkeypatch, capsys):
    more = ["--clip", "adagc", "--checkpoint-every", "10"]
    whole, options = bigram("whole", *more), bigram("killed", *more)
    pretrain.main(whole)

    here = str(Path(__file__).parent)
    start = [sys.executable, "-W", "error", "-c", KILLED, here]
    done = subprocess.run([*start, *options], capture_output=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    log = Path(options[-1]) / "adagc.jsonl"
    assert len(log.read_text().splitlines()) == 15

    interrupted(monkeypatch, [*options, "--resume"])
    printed = capsys.readouterr().out
    assert "adagc goes on from step 10" in printed
    assert "adagc: stopped before step 15; a checkpoint is written" in printed
    assert printed.strip().endswith(f"--out {options[-1]} --resume")

    pretrain.main([*options, "--resume"])
    assert written(Path(options[-1]), "adagc") == written(Path(whole[-1]), "adagc")

    # Finished now; what is damaged or of other options is refused in one line.
    line = refused(options, capsys)
    assert "has checkpoints of an earlier run. --resume goes on" in line
    line = refused([*options, "--resume", "--steps", "21", "--b2", "0.9"], capsys)
    assert "--steps was 20 and is 21; --b2 was 0.999 and is 0.9 for" in line
    (Path(options[-1]) / "adagc.finished.json").unlink()
    folder = Path(options[-1]) / "checkpoints" / "adagc"
    for path in (folder / "20" / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    line = refused([*options, "--resume"], capsys)
    assert f"{folder}/20 cannot be read" in line
    for path in (folder / "20" / "notes").rglob("*"):
        if path.is_file():
            path.write_text("{")
    assert f"{folder}/20 cannot be read" in refused([*options, "--resume"], capsys)
    shutil.rmtree(folder / "20")
    pretrain.main([*options, "--resume"])
    assert written(Path(options[-1]), "adagc") == written(Path(whole[-1]), "adagc")


def test_several_seeds_go_on_without_what_is_finished(bigram, monkeypatch):
    more = ["--clip", "value,none", "--seeds", "3", "--seed", "4"]
    broken = optax.chain(adagc_jax.global_gc(1.0), optax.scale(jax.numpy.nan))
    monkeypatch.setitem(clippers.CLIPPERS, "value", lambda settings: broken)
    whole, options = bigram("whole", *more), bigram("stopped", *more)
    pretrain.main(whole)
    trained = []

    class Counting(trainer.Trainer):
        def __init__(self, name, config, *rest):
            trained.append((config.seed, name))
            super().__init__(name, config, *rest)

    monkeypatch.setattr(pretrain, "Trainer", Counting)
    # A run of "value" has one block, and of "none" four.
    interrupted(monkeypatch, options, block=7)
    assert trained == [(4, "value"), (4, "none"), (5, "value"), (5, "none")]
    trained.clear()
    pretrain.main([*options, "--resume"])
    assert trained == [(5, "none"), (6, "value"), (6, "none")]

    for name in ("none", "value"):
        for seed in ("seed-4", "seed-5", "seed-6"):
            one, other = (written(Path(x[-1]) / seed, name) for x in (whole, options))
            assert one == other
    summary = json.loads((Path(options[-1]) / "summary.json").read_text())
    spread = summary["over_seeds"]
    losses = [
        written(Path(options[-1]) / f"seed-{seed}", "none")[1]["validation_loss"]
        for seed in (4, 5, 6)
    ]
    assert len(set(losses)) == 3
    assert spread["none"]["validation_loss"] == {
        "median": sorted(losses)[1],
        "min": min(losses),
        "max": max(losses),
        "values": losses,
    }
    assert (spread["value"]["stopped"], spread["none"]["stopped"]) == (3, 0)
    assert spread["value"]["validation_loss"] is None
    assert summary["reading"].startswith("Fewer than two clippers finished")


def test_numbers_that_are_none_are_left_out_of_the_medians():
    def result(loss):
        return dict.fromkeys(seeds._COLUMNS, 1.0) | {
            "validation_loss": loss,
            "jumps": {},
            "stopped": "",
        }

    found = [
        {"a": result(a), "b": result(b)}
        for a, b in ((1.0, 2.0), (math.nan, 3.0), (4.0, 3.5))
    ]
    spread = seeds.over_seeds(found)
    assert spread["a"]["validation_loss"]["median"] == 2.5
    assert spread["a"]["validation_loss"]["values"] == [1.0, None, 4.0]
    assert spread["b"]["validation_loss"]["median"] == 3.0
    assert spread["a"]["worst_jump"] is None
    # Of a run without a number nothing is claimed.
    assert "Fewer than two" in seeds.seeds_reading(spread)
    del found[1]
    assert "0.250 below b, which it beats in 1 of 2" in seeds.seeds_reading(
        seeds.over_seeds(found)
    )


def test_a_rollback_run_says_that_it_starts_again(bigram, monkeypatch, capsys):
    options = bigram("stopped", "--clip", "none", "--rollback", "7")
    interrupted(monkeypatch, options)
    printed = capsys.readouterr().out
    assert "none: stopped before step 5; --rollback has its snapshots in" in printed
    assert not (Path(options[-1]) / "checkpoints").exists()
    pretrain.main([*options, "--resume"])
    assert "none goes on from step 0" in capsys.readouterr().out
    assert len(written(Path(options[-1]), "none")[0].splitlines()) == 20


def test_tensorboard_of_a_run_that_went_on_has_every_step_once(bigram, monkeypatch):
    board = bigram.folder / "board"
    options = bigram("out", "--clip", "none", "--tensorboard", str(board))
    interrupted(monkeypatch, options, block=2)
    pretrain.main([*options, "--resume"])
    history = replay.read_history(board / "none-seed0")
    assert history.steps.tolist() == list(range(20))
    rows = [
        json.loads(line)
        for line in (Path(options[-1]) / "none.jsonl").read_text().splitlines()
    ]
    logged = [row["clip/logits/norm_before"] for row in rows]
    np.testing.assert_allclose(history.norm[:, 0], logged, rtol=1e-6)


def test_processes_share_the_devices_of_a_mesh(monkeypatch):
    calls = []
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *args, **_: calls.append(args)
    )
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setenv("XLA_FLAGS", "")
    settings = config.Config(mesh="fsdp=4,tensor=2", distributed="host:9000,2,1")
    assert mesh.join(settings).out == os.path.join(settings.out, "process-1")
    assert calls == [("host:9000", 2, 1)]
    assert os.environ["XLA_FLAGS"].endswith("device_count=4")
    with pytest.raises(cli.BadOption, match="8 devices, which 3 processes cannot"):
        mesh.join(dataclasses.replace(settings, distributed="host:9000,3,1"))


def test_a_checkpoint_is_not_taken_for_another_run(tmp_path):
    tree = {"w": jax.numpy.ones(2)}
    first = checkpoint.Checkpoints(tmp_path / "run", 5, {"b2": 0.999})
    assert first.notes(False) == {}
    due = [first.is_due(range(s, s + 4), end=12) for s in (0, 1, 5, 8)]
    assert due == [False, True, False, True]
    first.save(5, tree, lines=5)
    first.close()
    with pytest.raises(cli.BadOption, match="--resume goes on from them"):
        first.notes(False)
    other = checkpoint.Checkpoints(tmp_path / "run", 5, {"b2": 0.9})
    with pytest.raises(cli.BadOption, match=r"--b2 was 0\.999 and is 0\.9"):
        other.notes(True)
    other.close()
    (tmp_path / "empty").mkdir()
    assert checkpoint.Checkpoints(tmp_path / "empty", 5, {}).notes(False) == {}


def test_a_log_that_does_not_belong_to_its_checkpoint_is_refused(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n')
    assert checkpoint.StepLog(path, keep=1).rows == [{"step": 0}]
    assert path.read_text() == '{"step": 0}\n'
    with pytest.raises(cli.BadOption, match="has 1 lines"):
        checkpoint.StepLog(path, keep=2)
    path.unlink()
    with pytest.raises(cli.BadOption, match="has 0 lines"):
        checkpoint.StepLog(path, keep=2)
