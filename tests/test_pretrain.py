"""The main example's models, meshes, data, and what a kill or Ctrl-C leaves behind."""

import dataclasses
import gzip
import importlib
import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

checkpoint = importlib.import_module("_checkpoint")
config = importlib.import_module("_config")
data = importlib.import_module("_data")
job = importlib.import_module("_job")
mesh = importlib.import_module("_mesh")
optimizers = importlib.import_module("_optimizers")
pretrain = importlib.import_module("pretrain")
report = importlib.import_module("_report")
sizes = importlib.import_module("_sizes")

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


def test_scanned_layers_and_a_mesh_change_nothing():
    one = config.Config(**TINY, model="mixtral")
    scanned = dataclasses.replace(one, scan_layers=True)
    place = mesh.Placement(mesh.make_mesh(mesh.parse_mesh("fsdp=2,tensor=2,expert=2")))
    sharded = job.new_job(scanned, lambda c: place.params(lambda: job.initial(c)))
    split = {tuple(x.sharding.spec) for x in jax.tree.leaves(sharded.initial)}
    assert (None, "fsdp", "tensor") in split
    losses = []
    for made, batch in (
        (job.new_job(one), BATCH),
        (job.new_job(scanned), BATCH),
        (sharded, place.batch(BATCH)),
    ):
        loss, grads = jax.jit(jax.value_and_grad(made.loss_fn))(made.initial, batch)
        losses.append((float(loss), float(jax.numpy.sum(grads["norm"]["scale"] ** 2))))
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-5)


def test_bfloat16_computes_in_it_and_keeps_float32():
    made = job.new_job(config.Config(**TINY, dtype="bfloat16"))
    jaxpr = str(jax.make_jaxpr(made.loss_fn)(made.initial, BATCH))
    assert "bf16[4,8,16]" in jaxpr
    loss = made.loss_fn(made.initial, BATCH)
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
    with pytest.raises(ImportError, match="pip install datasets"):
        data.load_corpus("c4")


def test_files_come_from_a_pattern(tmp_path):
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(name)
    corpus = data.load_corpus(str(tmp_path / "*.txt"))
    assert corpus.validation.tobytes() == b"a.txt"
    assert corpus.train.tobytes() == b"b.txt"


# A run that is killed when it has logged step 14; its checkpoint is from step 10.
KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv.pop(1))
import _report, pretrain
def update(self, name, row, seconds):
    if row["step"] == 14:
        os.kill(os.getpid(), signal.SIGKILL)
_report.Live.update = update
pretrain.main()
"""


def options_of(folder, out):
    """A run of 20 steps with one clipper."""
    shape = TINY | {"layers": 1, "steps": 20, "log_every": 5, "checkpoint_every": 10}
    pairs = [(f"--{key.replace('_', '-')}", str(v)) for key, v in shape.items()]
    flat = [word for pair in pairs for word in pair]
    fixed = ["--quick", *flat, "--bursts", "", "--clip", "adagc"]
    return [*fixed, "--data", str(folder), "--out", str(folder / out)]


def written(options):
    """The log, and the results without times."""
    out = Path(options[-1])
    result = json.loads((out / "summary.json").read_text())["results"]["adagc"]
    del result["ms_per_step"], result["compile_seconds"]
    return (out / "adagc.jsonl").read_text(), result


def press_ctrl_c(self, name, row, seconds):
    os.kill(os.getpid(), signal.SIGINT)


def test_killed_and_interrupted_runs_go_on_bit_for_bit(tmp_path, monkeypatch, capsys):
    for name in "ab":
        lines = (f"value_{i} = {i * i}\n" for i in range(500))
        (tmp_path / f"{name}.py").write_text("".join(lines))
    whole, options = options_of(tmp_path, "whole"), options_of(tmp_path, "killed")
    monkeypatch.setattr(pretrain, "draw", lambda *_: None)
    pretrain.main(whole)

    start = [sys.executable, "-W", "error", "-c", KILLED, str(EXAMPLES)]
    done = subprocess.run([*start, *options], capture_output=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    log = Path(options[-1]) / "adagc.jsonl"
    assert len(log.read_text().splitlines()) == 15

    with monkeypatch.context() as patch:
        patch.setattr(report.Live, "update", press_ctrl_c)
        with pytest.raises(SystemExit) as ended:
            pretrain.main([*options, "--resume"])
    assert ended.value.code == 130
    printed = capsys.readouterr().out
    assert "adagc: stopped before step 15; a checkpoint is written" in printed
    assert printed.strip().endswith(f"--out {options[-1]} --resume")

    pretrain.main([*options, "--resume"])
    assert written(options) == written(whole)


def test_a_checkpoint_is_not_taken_for_another_run(tmp_path):
    tree = {"w": jax.numpy.ones(2)}
    first = checkpoint.Checkpoints(tmp_path / "run", 5, {"b2": 0.999})
    assert first.start(False, tree) == (tree, {})
    assert [first.is_due(range(s, s + 4)) for s in (0, 1, 5)] == [False, True, False]
    first.save(5, tree, lines=5)
    first.close()
    with pytest.raises(ValueError, match="--resume goes on from them"):
        first.start(False, tree)
    other = checkpoint.Checkpoints(tmp_path / "run", 5, {"b2": 0.9})
    with pytest.raises(ValueError, match=r"b2 was 0\.999 and is 0\.9"):
        other.start(True, tree)
    other.close()


def test_a_log_shorter_than_its_checkpoint_is_refused(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n')
    assert checkpoint.StepLog(path, keep=1).rows == [{"step": 0}]
    assert path.read_text() == '{"step": 0}\n'
    with pytest.raises(ValueError, match="has 1 lines"):
        checkpoint.StepLog(path, keep=2)
