"""The settings of the job."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from _cli import calls, check_numbers, knob, one_of
from _clippers import CLIPPERS, new_clipper
from _data import Batch, Burst, Corpus, parse_bursts, train_batch
from _mesh import mesh_text, processes_text
from _sizes import SIZES, size_options
from _together import check_together

import adagc_jax

_ADAGC = ("clip", "adagc", "adagc-ema", "adagc-global", "adagc-literal")


@dataclasses.dataclass(frozen=True)
class Config:
    """Every setting of the job; each is a command-line option of the same name."""

    clip: tuple[str, ...] = knob(
        ("none", "global", "adagc"),
        f"clippers to train in turn, out of {', '.join(CLIPPERS)}; with options of its "
        "own as adagc(lambda_rel=1.1,warmup_steps=20)",
        calls(tuple(CLIPPERS)),
    )
    bursts: tuple[Burst, ...] = knob(
        (Burst("random", 120), Burst("xor", 220), Burst("labels", 300)),
        "corrupted stretches as KIND@STEP, the first step of each: random (bytes), xor "
        "(bytes with one mask), labels (of other positions), constant (one byte "
        "repeated); '' for none",
        parse_bursts,
    )
    burst_length: int = knob(5, "corrupted batches in a row", at_least=1)
    steps: int = knob(360, "training steps per clipper", at_least=1)
    batch_size: int = knob(16, "sequences per step", at_least=1)
    length: int = knob(128, "bytes per sequence", at_least=3)
    model: str = knob(
        "llama",
        "llama, qwen (queries and keys normalised) or mixtral (experts)",
        one_of("llama", "qwen", "mixtral"),
    )
    size: str = knob(
        "toy",
        "shapes of the model, see --describe; options given by name win over it",
        one_of(*SIZES),
    )
    experts: int = knob(
        4,
        "mixtral: experts per layer, two of which see a token",
        only=("model", "mixtral"),
        at_least=2,
    )
    layers: int = knob(2, "decoder layers", at_least=1)
    width: int = knob(64, "width of the model", at_least=1)
    heads: int = knob(4, "query heads", at_least=1)
    kv_heads: int = knob(2, "key/value heads, shared by the query heads", at_least=1)
    hidden: int = knob(176, "width of the feed-forward block", at_least=1)
    vocab: int = knob(
        256, "rows of the embedding; data are bytes, and use 256", at_least=256
    )
    scan_layers: bool = knob(False, "stack the layers, and run them by jax.lax.scan")
    dtype: str = knob(
        "float32",
        "what the model and its gradients are computed in; parameters stay float32",
        one_of("float32", "bfloat16"),
    )
    precision: str = knob(
        "default",
        "of matrix products, as jax.default_matmul_precision",
        one_of("default", "bfloat16", "tensorfloat32", "float32", "highest"),
    )
    optimizer: str = knob(
        "adamw",
        "adamw, lion or muon (for matrices, AdamW for the rest)",
        one_of("adamw", "lion", "muon"),
    )
    peak_lr: float = knob(
        1e-2, "learning rate after warm-up; it ends at a tenth", above=0, below=math.inf
    )
    b2: float = knob(
        0.999,
        "decay of the second moment of AdamW, and of Muon's AdamW; or of Lion's "
        "momentum, and then by default 0.99",
        at_least=0,
        below=1,
    )
    eps: float = knob(
        1e-8,
        "term in the denominator of AdamW, and of Muon",
        only=("optimizer", "adamw", "muon"),
        at_least=0,
        below=1,
    )
    weight_decay: float = knob(0.1, "weight decay", at_least=0, below=math.inf)
    max_norm: float = knob(
        1.0,
        "limit of the norm for global and tensor",
        only=("clip", "global", "tensor"),
        above=0,
    )
    max_value: float = knob(
        0.01, "limit of each entry for value", only=("clip", "value"), above=0
    )
    agc_clipping: float = knob(
        0.01, "limit of |gradient|/|weight| for agc", only=("clip", "agc"), above=0
    )
    lambda_rel: float = knob(
        1.04, "adagc: limit as a multiple of the reference norm", only=_ADAGC, above=0
    )
    beta: float = knob(
        0.99, "adagc: decay of the reference norm", only=_ADAGC, at_least=0, below=1
    )
    lambda_abs: float = knob(
        1.0, "adagc: limit of the global norm during warm-up", only=_ADAGC, above=0
    )
    clip_warmup_steps: int = knob(
        100, "adagc: first steps, clipped by global norm", only=_ADAGC, at_least=0
    )
    seed: int = knob(
        0, "decides the parameters, the batches and their corruption", at_least=0
    )
    seeds: int = knob(
        1, "how many seeds to train with, counted up from seed", at_least=1
    )
    validation_batches: int = knob(
        40, "held-out batches that measure the end", at_least=1
    )
    guard: bool = knob(
        False, "skip whole steps whose gradients or loss are not finite or spike"
    )
    rollback: int = knob(
        0,
        "steps between snapshots to go back to when the loss spikes; 0: none",
        at_least=0,
    )
    window: int = knob(
        100, "clean steps that a loss is compared with for z", at_least=2
    )
    n_sigma: float = knob(10.0, "z from which a loss counts as a spike", above=0)
    log_every: int = knob(10, "steps between two looks at the device", at_least=1)
    data: str = knob(
        "stdlib",
        "stdlib (.py files of Python's own library), c4 (a stream), a folder of .py "
        "files or of c4-train.*.json.gz shards, or a pattern such as texts/*.txt",
    )
    data_mb: int = knob(50, "megabytes of C4 to take", at_least=1)
    mesh: str = knob(
        "", "devices to shard over, as fsdp=4,tensor=2; else one device", mesh_text
    )
    distributed: str = knob(
        "",
        "one of several processes: HOST:PORT,PROCESSES,INDEX, or auto on a cluster; "
        "the mesh goes over the devices of all",
        processes_text,
    )
    checkpoint_every: int = knob(
        0, "steps between checkpoints; 0: only on Ctrl-C", at_least=0
    )
    resume: bool = knob(
        False, "leave out the runs that are finished, go on from the last checkpoint"
    )
    tensorboard: str = knob("", "folder for TensorBoard, written by tensorboardX")
    wandb: str = knob("", "project of Weights & Biases to log to")
    out: str = knob("out/pretrain", "folder for the results")
    describe: bool = knob(False, "count the parameters of all sizes, train nothing")

    def __post_init__(self):
        check_numbers(self)
        check_together(self)
        for clip in self.clip:
            new_clipper(clip, self)

    @property
    def spike_rule(self) -> adagc_jax.SpikeRule:
        """SkipStep's, with a window that is full early enough in a short run."""
        rule = adagc_jax.SKIP_STEP
        window = max(10, min(rule.window, self.steps // 6))
        return dataclasses.replace(rule, window=window, min_history=window // 2)

    def kind(self, index: int) -> str:
        """What kind of batch it is; its index is the step, unless some were skipped."""
        inside = (b for b in self.bursts if 0 <= index - b.step < self.burst_length)
        return next((burst.kind for burst in inside), "clean")

    def batch(self, corpus: Corpus, index: int) -> Batch:
        """The batch of that index, the same for every clipper."""
        return train_batch(
            corpus.train,
            seed=self.seed,
            step=index,
            batch_size=self.batch_size,
            length=self.length,
            kind=self.kind(index),
        )


QUICK = {
    "steps": 60,
    "batch_size": 8,
    "length": 32,
    "width": 32,
    "hidden": 64,
    "clip_warmup_steps": 15,
    "bursts": (Burst("random", 25), Burst("xor", 42)),
    "validation_batches": 4,
    "window": 15,
}


def implied(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the options of a command line set besides themselves."""
    lion = {"b2": 0.99} if given.get("optimizer") == "lion" else {}
    return size_options(given) | lion
