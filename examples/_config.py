"""The settings of the job."""

import dataclasses
import glob
import math
from pathlib import Path

from _cli import calls, knob, one_of
from _clippers import CLIPPERS, new_clipper
from _data import Batch, Burst, Corpus, parse_bursts, train_batch
from _mesh import mesh_text, parse_mesh
from _sizes import SIZES

import adagc_jax

_AT_LEAST_ONE = (
    "steps",
    "batch_size",
    "length",
    "layers",
    "log_every",
    "seeds",
    "data_mb",
)


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
        "first steps of the corrupted stretches and what is done to them: random "
        "bytes, bytes xor-ed with one mask, labels of other positions, one constant "
        "byte",
        parse_bursts,
    )
    burst_length: int = knob(5, "corrupted batches in a row")
    steps: int = knob(360, "training steps per clipper")
    batch_size: int = knob(16, "sequences per step")
    length: int = knob(128, "bytes per sequence")
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
    experts: int = knob(4, "mixtral: experts per layer, two of which see a token")
    layers: int = knob(2, "decoder layers")
    width: int = knob(64, "width of the model")
    heads: int = knob(4, "query heads")
    kv_heads: int = knob(2, "key/value heads, shared by the query heads")
    hidden: int = knob(176, "width of the feed-forward block")
    vocab: int = knob(256, "rows of the embedding; data are bytes, and use 256")
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
    peak_lr: float = knob(1e-2, "learning rate after warm-up; it ends at a tenth")
    b2: float = knob(0.999, "decay of AdamW's second moment")
    eps: float = knob(1e-8, "AdamW's term in the denominator")
    weight_decay: float = knob(0.1, "weight decay")
    max_norm: float = knob(1.0, "limit of the norm for global and tensor")
    max_value: float = knob(0.01, "limit of each entry for value")
    agc_clipping: float = knob(0.01, "limit of |gradient|/|weight| for agc")
    lambda_rel: float = knob(1.04, "adagc: limit as a multiple of the reference norm")
    beta: float = knob(0.99, "adagc: decay of the reference norm")
    lambda_abs: float = knob(1.0, "adagc: limit of the global norm during warm-up")
    clip_warmup_steps: int = knob(100, "adagc: first steps, clipped by global norm")
    seed: int = knob(0, "decides the parameters, the batches and their corruption")
    seeds: int = knob(1, "how many seeds to train with, counted up from seed")
    validation_batches: int = knob(40, "held-out batches that measure the end")
    guard: bool = knob(
        False, "skip whole steps whose gradients or loss are not finite or spike"
    )
    rollback: int = knob(
        0, "steps between snapshots to go back to when the loss spikes; 0: none"
    )
    window: int = knob(100, "clean steps that a loss is compared with for z")
    n_sigma: float = knob(10.0, "z from which a loss counts as a spike")
    log_every: int = knob(10, "steps between two looks at the device")
    data: str = knob(
        "stdlib",
        "stdlib (.py files of Python's own library), c4 (a stream), a folder of .py "
        "files or of c4-train.*.json.gz shards, or a pattern such as texts/*.txt",
    )
    data_mb: int = knob(50, "megabytes of C4 to take")
    mesh: str = knob(
        "", "devices to shard over, as fsdp=4,tensor=2; else one device", mesh_text
    )
    distributed: str = knob(
        "", "one of several processes: HOST:PORT,PROCESSES,INDEX, or auto on a cluster"
    )
    checkpoint_every: int = knob(0, "steps between checkpoints; 0: only on Ctrl-C")
    resume: bool = knob(False, "go on from the last checkpoint in the folder")
    tensorboard: str = knob("", "folder for TensorBoard, written by tensorboardX")
    wandb: str = knob("", "project of Weights & Biases to log to")
    out: str = knob("out/pretrain", "folder for the results")
    describe: bool = knob(False, "count the parameters of all sizes, train nothing")

    def __post_init__(self):
        self._check_numbers()
        self._check_data()
        for clip in self.clip:
            new_clipper(clip, self)
        for burst in self.bursts:
            if not 10 <= burst.step <= self.steps - self.burst_length - 5:
                raise ValueError(
                    f"burst {burst} needs ten steps before it and five after it "
                    f"within {self.steps} steps"
                )
        if self.rollback and (self.checkpoint_every or self.resume):
            raise ValueError(
                "rollback keeps its snapshots in memory, which checkpoint_every and "
                "resume cannot bring back: choose one of them"
            )

    def _check_numbers(self) -> None:
        least = dict.fromkeys(_AT_LEAST_ONE, 1)
        least |= {"rollback": 0, "checkpoint_every": 0, "vocab": 256}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(
                    f"{name} must be at least {low}: {getattr(self, name)}"
                )
        if self.heads % self.kv_heads or self.width % (2 * self.heads):
            raise ValueError(
                "heads must be a multiple of kv_heads and width of 2 x heads: got "
                f"{self.width=}, {self.heads=}, {self.kv_heads=}"
            )
        if self.model == "mixtral" and self.experts < 2:
            raise ValueError(f"experts must be at least 2: {self.experts}")

    def _check_data(self) -> None:
        known = self.data in ("", "stdlib", "c4") or glob.has_magic(self.data)
        if not known and not Path(self.data).is_dir():
            raise ValueError(
                f"data must be a folder, a pattern, stdlib or c4: {self.data!r}"
            )
        rows = math.prod(parse_mesh(self.mesh)[axis] for axis in ("data", "fsdp"))
        if self.batch_size % rows:
            raise ValueError(
                f"mesh: {self.mesh} splits a batch by {rows}, which does not divide "
                f"batch_size {self.batch_size}"
            )

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
