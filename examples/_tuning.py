"""What both runs of `finetune.py` share: settings, packed documents, optimizers."""

import dataclasses
import glob
import math
import sysconfig
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from _cli import BadOption, check_numbers, knob, one_of
from _clippers import new_clipper
from _config import Config
from _data import Batch
from _job import Job
from _lora import Adapters, merged, new_adapters, scaled
from _trainer import validate

import adagc_jax


@dataclasses.dataclass(frozen=True)
class Settings:
    """Every setting; each is a command-line option of the same name."""

    clip: str = knob("adagc", "adagc or agc", one_of("adagc", "agc"))
    steps: int = knob(80, "steps of fine-tuning", at_least=1)
    length: int = knob(256, "bytes of context in fine-tuning", at_least=4)
    batch_size: int = knob(8, "sequences per step of fine-tuning", at_least=1)
    rank: int = knob(4, "rank of the adapters", at_least=1)
    alpha: float = knob(8.0, "the adapters' product counts alpha / rank", above=0)
    peak_lr: float = knob(
        1e-2, "learning rate of fine-tuning after warm-up", above=0, below=math.inf
    )
    floor: float = knob(
        0.1,
        "lowest learning rate after warm-up, as a part of peak_lr",
        at_least=0,
        below=1,
    )
    restart_every: int = knob(
        0, "steps of a cosine cycle; 0: one for all steps", at_least=0
    )
    max_norm: float = knob(
        1.0, "limit of the global norm after the clipper", above=0, below=math.inf
    )
    explode_step: int = knob(
        35, "step whose queries are too large; -1: none", at_least=-1
    )
    explode: float = knob(1000.0, "what the queries are multiplied by in that step")
    nan_step: int = knob(55, "step whose queries are NaN; -1: none", at_least=-1)
    documents: str = knob(
        "", "pattern of texts to tune on; else the long files of Python's own library"
    )
    base: str = knob(
        "",
        "base model: a folder that pretrain.py --checkpoint-every has written, or one "
        "clipper's folder of checkpoints in it; if it is not there yet, the base model "
        "that the options ask for is kept there (needs orbax-checkpoint). Without it "
        "that model is trained every time",
    )
    base_steps: int = knob(150, "steps of a base model trained here", at_least=20)
    base_length: int = knob(64, "bytes of context of one trained here", at_least=3)
    layers: int = knob(2, "decoder layers of one trained here", at_least=1)
    width: int = knob(64, "width of one trained here, a multiple of 8", at_least=8)
    seed: int = knob(0, "decides the parameters and the batches", at_least=0)
    out: str = knob("out/finetune", "folder for the results")

    def __post_init__(self):
        check_numbers(self)
        if self.width % 8:
            raise BadOption(f"--width must be a multiple of 8, got {self.width}")

    @property
    def base_config(self) -> Config:
        """The settings of the base model, in those of `pretrain.py`."""
        return Config(
            clip=("adagc-ema",),
            bursts=(),
            steps=self.base_steps,
            length=self.base_length,
            layers=self.layers,
            width=self.width,
            hidden=2 * self.width,
            clip_warmup_steps=10,
            seed=self.seed,
            # A checkpoint that a Ctrl-C left is gone on from, too.
            resume=True,
            checkpoint_every=self.base_steps if self.base else 0,
            out=self.base or str(Path(self.out) / "base"),
        )

    def gain(self, step: int) -> np.float32:
        """What the queries of that step are multiplied by."""
        broken = {self.explode_step: self.explode, self.nan_step: np.nan}
        return np.float32(broken.get(step, 1.0))


QUICK = {
    "steps": 30,
    "length": 48,
    "batch_size": 4,
    "explode_step": 16,
    "nan_step": 24,
    "base_steps": 40,
    "base_length": 32,
    "layers": 1,
    "width": 32,
}


def packed_documents(pattern: str, length: int) -> np.ndarray:
    """Long documents, end to end with a zero byte between, u8[rows, length + 1].

    Raises:
      BadOption: If there are too few of at least four contexts each.
    """
    pattern = pattern or str(Path(sysconfig.get_paths()["stdlib"]) / "*.py")
    paths = sorted(map(Path, glob.glob(pattern, recursive=True)))
    texts = [path.read_bytes() for path in paths if path.is_file()]
    long = [text for text in texts if len(text) >= 4 * length]
    joined = np.frombuffer(b"\0".join(long), np.uint8)
    rows = joined.size // (length + 1)
    if rows < 20:
        raise BadOption(
            f"--documents {pattern!r} fill {rows} rows of {length} bytes, and 20 are "
            f"needed: give more texts of at least {4 * length} bytes"
        )
    return joined[: rows * (length + 1)].reshape(rows, length + 1)


def split(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows to train on, and every twentieth, at most 32, held out."""
    held_out = np.arange(len(rows)) % 20 == 0
    return rows[~held_out], rows[held_out][:32]


def as_batch(rows: np.ndarray) -> Batch:
    """Inputs and targets of packed rows."""
    rows = rows.astype(np.int32)
    return rows[:, :-1], rows[:, 1:]


def pipeline(settings: Settings) -> optax.GradientTransformationExtraArgs:
    """A guard around: clipper, limit of the global norm, AdamW."""
    rules = {
        "adagc": adagc_jax.EmaRatio(
            lambda_rel=1.5, beta=0.95, lambda_abs=1.0, warmup_steps=8, warmup_init="ema"
        ),
        "agc": adagc_jax.ParamRatio(clipping=0.1),
    }
    clip = adagc_jax.clip_by_rule(
        (rules[settings.clip], adagc_jax.per_tensor()),
        (adagc_jax.FixedNorm(settings.max_norm), adagc_jax.whole_tree()),
    )
    return adagc_jax.guard(optax.chain(clip, adamw(settings)))


def unprotected(settings: Settings) -> optax.GradientTransformationExtraArgs:
    """AdamW, with norms measured before it."""
    measure = new_clipper("none", settings.base_config)
    return optax.with_extra_args_support(optax.chain(measure, adamw(settings)))


def adamw(settings: Settings) -> optax.GradientTransformation:
    """AdamW with warm-up, cosine, restarts if asked for, and a floor."""
    every = settings.restart_every
    restarts = adagc_jax.schedules.Restarts(period=every) if every else None
    rate = adagc_jax.schedules.warmup_cosine(
        settings.peak_lr,
        settings.steps,
        warmup=0.1,
        floor=settings.floor,
        restarts=restarts,
    )
    return optax.adamw(rate)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What both runs share: the start, the data, and losses of the adapters alone."""

    settings: Settings
    job: Job
    base: Any
    train: np.ndarray
    held_out: np.ndarray

    @property
    def adapters(self) -> Adapters:
        """New adapters, of which B is zero."""
        return new_adapters(self.base, self.settings.rank, self.settings.seed)

    def model(self, base: Any, adapters: Adapters) -> Any:
        """The base with the adapters."""
        return merged(base, adapters, self.settings.alpha / self.settings.rank)

    def loss(self, adapters: Adapters, batch: Any) -> jax.Array:
        """Of adapters and (base, gain of the queries, tokens)."""
        base, gain, tokens = batch
        broken = scaled(self.model(base, adapters), "attn/q/kernel$", gain)
        return self.job.loss_fn(broken, tokens)

    def batch(self, step: int) -> Any:
        """The batch of a step, the same in both runs."""
        settings = self.settings
        rng = np.random.default_rng((settings.seed, step))
        rows = self.train[rng.integers(0, len(self.train), settings.batch_size)]
        return self.base, settings.gain(step), as_batch(rows)

    def validate(self, adapters: Adapters) -> float:
        """The held-out loss."""
        loss = jax.jit(self.job.validation_loss_fn)
        model = self.model(self.base, adapters)
        return validate(model, loss, [as_batch(self.held_out)])

    def kind(self, step: int) -> str:
        """What is wrong with the batch of a step."""
        gain = self.settings.gain(step)
        return "nan" if np.isnan(gain) else "clean" if gain == 1 else "exploding"
