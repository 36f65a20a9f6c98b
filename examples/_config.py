"""The settings of the job, and the clippers that can be chosen."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
from _cli import knob, names
from _data import Batch, Burst, Corpus, parse_bursts, train_batch

import adagc_jax

Clipper = Callable[["Config"], optax.GradientTransformation]


def _measure() -> optax.GradientTransformation:
    """Clips nothing, but its state has the norms."""
    return adagc_jax.global_gc(1e30, nonfinite="propagate")


def _adagc(config: "Config", **options: Any) -> optax.GradientTransformation:
    return adagc_jax.adagc(
        config.lambda_rel,
        config.beta,
        config.lambda_abs,
        config.clip_warmup_steps,
        **options,
    )


CLIPPERS: dict[str, Clipper] = {
    "none": lambda config: _measure(),
    "global": lambda config: adagc_jax.global_gc(config.max_norm),
    "value": lambda config: optax.chain(
        _measure(), adagc_jax.clip_by_value(config.max_value), _measure()
    ),
    "tensor": lambda config: adagc_jax.tensor_gc(config.max_norm),
    "agc": lambda config: adagc_jax.agc(config.agc_clipping),
    "zclip": lambda config: adagc_jax.zclip(),
    "adagc": lambda config: _adagc(config),
    "adagc-ema": lambda config: _adagc(config, warmup_init="ema"),
    "adagc-global": lambda config: _adagc(config, groups=adagc_jax.whole_tree()),
    "robust": lambda config: adagc_jax.robust_gc(),
}


def clip_numbers(opt_state: optax.OptState, params: optax.Params) -> dict[str, Any]:
    """What the clipper did in the last step, in all and per tensor, as scalars."""
    numbers = adagc_jax.clip_metrics(opt_state, params, level="all")
    if "clip/norm_before" in numbers:
        return numbers
    # A clip by value has no norms of its own: compare those around it.
    before, after = (
        {
            key.removeprefix(f"clip/{place}/").removesuffix("norm_before"): value
            for key, value in numbers.items()
            if key.startswith(f"clip/{place}/") and key.endswith("norm_before")
        }
        for place in (0, 1)
    )
    total, total_after = before.pop(""), after.pop("")
    scales = {path: after[path] / before[path] for path in before}
    clipped = jnp.stack(list(scales.values())) < 1
    return {
        "clip/norm_before": total,
        "clip/norm_after": total_after,
        "clip/fraction_clipped": jnp.mean(clipped.astype(jnp.float32)),
        **{f"clip/{path}scale": scale for path, scale in scales.items()},
    }


@dataclasses.dataclass(frozen=True)
class Config:
    """Every setting of the job; each is a command-line option of the same name."""

    clip: tuple[str, ...] = knob(
        ("none", "global", "adagc"),
        f"clippers to train in turn, out of {', '.join(CLIPPERS)}",
        names(tuple(CLIPPERS)),
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
    layers: int = knob(2, "decoder layers")
    width: int = knob(64, "width of the model")
    heads: int = knob(4, "query heads")
    kv_heads: int = knob(2, "key/value heads, shared by the query heads")
    hidden: int = knob(176, "width of the feed-forward block")
    peak_lr: float = knob(1e-2, "learning rate after warm-up; it ends at a tenth")
    b2: float = knob(0.999, "decay of AdamW's second moment")
    weight_decay: float = knob(0.1, "AdamW's weight decay")
    max_norm: float = knob(1.0, "limit of the norm for global and tensor")
    max_value: float = knob(0.01, "limit of each entry for value")
    agc_clipping: float = knob(0.01, "limit of |gradient|/|weight| for agc")
    lambda_rel: float = knob(1.04, "adagc: limit as a multiple of the reference norm")
    beta: float = knob(0.99, "adagc: decay of the reference norm")
    lambda_abs: float = knob(1.0, "adagc: limit of the global norm during warm-up")
    clip_warmup_steps: int = knob(100, "adagc: first steps, clipped by global norm")
    seed: int = knob(0, "decides the parameters, the batches and their corruption")
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
    data: str = knob("", "folder of .py files instead of the standard library")
    out: str = knob("out/pretrain", "folder for the results")

    def __post_init__(self):
        for name in ("steps", "batch_size", "length", "layers", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1: {getattr(self, name)}")
        if self.heads % self.kv_heads or self.width % (2 * self.heads):
            raise ValueError(
                "heads must be a multiple of kv_heads and width of 2 x heads: got "
                f"{self.width=}, {self.heads=}, {self.kv_heads=}"
            )
        if self.rollback < 0:
            raise ValueError(f"rollback must be at least 0: {self.rollback}")
        if self.data and not Path(self.data).is_dir():
            raise ValueError(f"data must be a folder: {self.data!r}")
        for burst in self.bursts:
            if not 10 <= burst.step <= self.steps - self.burst_length - 5:
                raise ValueError(
                    f"burst {burst} needs ten steps before it and five after it "
                    f"within {self.steps} steps"
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
