"""Trains a small byte-level Llama through bursts of bad batches, once per clipper.

Every clipper starts from the same parameters and sees the same batches of Python's own
standard library. At some points several batches in a row are corrupted. The question
is what those gradients do to the model, and at what price a clipper prevents it.

    python examples/pretrain.py
    python examples/pretrain.py --clip global,zclip,adagc --seed 1
    python examples/pretrain.py --quick

Two more remedies can be put on top of every clipper. A guard skips the whole step if
the norm of the gradients or the loss stands out, and a NaN then no longer ends the run.
A rollback goes back to a snapshot if the loss spiked, and on with later batches.

    python examples/pretrain.py --guard
    python examples/pretrain.py --rollback 20

Results go to `out/pretrain`: a picture, a log per clipper with one JSON object per
step, and `summary.json` with the settings, versions, hardware and results.
"""

import dataclasses
import functools
import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _analysis import Run, reading, summarise
from _cli import parse_config
from _config import CLIPPERS, QUICK, Config, clip_numbers
from _data import Batch, Corpus, load_corpus, validation_batches
from _model import Decoder, next_byte_loss
from _plot import draw
from _recovery import Recovery
from _report import (
    Live,
    hardware,
    new_console,
    table,
    versions,
    write_log,
    write_summary,
)
from flax import nnx
from rich.console import Console

import adagc_jax

LossFn = Callable[[Any, Batch], jax.Array]


def new_model(config: Config) -> tuple[Any, LossFn]:
    """Initial parameters as a tree of arrays, and the loss as a function of them."""
    model = Decoder(
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        kv_heads=config.kv_heads,
        hidden=config.hidden,
        rngs=nnx.Rngs(config.seed),
    )
    structure, state = nnx.split(model)

    def loss_fn(params, batch):
        return next_byte_loss(nnx.merge(structure, params), *batch)

    return nnx.to_pure_dict(state), loss_fn


def new_optimizer(name: str, config: Config) -> optax.GradientTransformationExtraArgs:
    """The clipper, then AdamW with a linear warm-up and a cosine decay.

    A guard goes around both: a step that it skips must leave them as they were.
    """
    schedule = adagc_jax.schedules.warmup_cosine(config.peak_lr, config.steps)
    adamw = optax.adamw(schedule, b2=config.b2, weight_decay=config.weight_decay)
    optimizer = optax.chain(CLIPPERS[name](config), adamw)
    if config.guard:
        return adagc_jax.guard(optimizer, spike=config.spike_rule)
    return optax.with_extra_args_support(optimizer)


def nonfinite(grads: Any) -> dict[str, jax.Array]:
    """Whether each tensor's gradient, by path, holds a NaN or an infinity."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): ~jnp.isfinite(g).all()
        for path, g in jax.tree_util.tree_leaves_with_path(grads)
    }


def new_train_step(
    optimizer: optax.GradientTransformationExtraArgs, loss_fn: LossFn
) -> jax.stages.Wrapped:
    """One step: loss, gradients, clip, AdamW; and the numbers for the log."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, loss=loss)
        params = optax.apply_updates(params, updates)
        numbers = {"loss": loss, **clip_numbers(opt_state, params)}
        if isinstance(opt_state, adagc_jax.GuardState):
            numbers |= adagc_jax.guard_metrics(opt_state)
        return params, opt_state, (numbers, nonfinite(grads))

    return train_step


def begin(
    run: Run, config: Config, corpus: Corpus, initial: Any, loss_fn: LossFn
) -> tuple[jax.stages.Compiled, Any, optax.OptState]:
    """The compiled step, and what it starts from: parameters and optimizer state."""
    optimizer = new_optimizer(run.name, config)
    # The step donates its inputs, and the next clipper needs the same start.
    params = jax.tree.map(jnp.copy, initial)
    opt_state = optimizer.init(params)
    started = time.perf_counter()
    train_step = new_train_step(optimizer, loss_fn)
    train_step = train_step.lower(params, opt_state, config.batch(corpus, 0)).compile()
    run.compile_seconds = time.perf_counter() - started
    return train_step, params, opt_state


def train(
    name: str,
    config: Config,
    corpus: Corpus,
    initial: Any,
    loss_fn: LossFn,
    live: Live,
) -> tuple[Run, Any]:
    """Trains with one clipper; returns the log and the final parameters."""
    run, digest, block_ms = Run(name), hashlib.sha256(), []
    live.begin(name)
    train_step, params, opt_state = begin(run, config, corpus, initial, loss_fn)
    recovery, first = Recovery(config), 0

    while first < config.steps and not run.stopped:
        steps = range(first, min(first + config.log_every, config.steps))
        pending = []
        started = time.perf_counter()
        for step in steps:
            recovery.keep(step, (params, opt_state))
            batch = config.batch(corpus, step + recovery.ahead)
            digest.update(np.stack(batch).tobytes())
            params, opt_state, numbers = train_step(params, opt_state, batch)
            pending.append(numbers)
        # Waiting once per block keeps the device busy while Python runs ahead.
        fetched = jax.device_get(pending)
        block_ms.append(1e3 * (time.perf_counter() - started) / len(steps))
        for step, numbers in zip(steps, fetched, strict=True):
            run.add(recovery.where(step), *numbers)
        live.update(name, run.rows[-1], block_ms[-1] / 1e3)
        first = steps.stop
        if back := recovery.go_back(run):
            (params, opt_state), first = back.tree, back.step
            live.say_rollback(name, run.rollbacks[-1])
    run.ms_per_step = statistics.median(block_ms)
    run.batches_sha256 = digest.hexdigest()
    return run, params


def validate(params: Any, loss_fn: LossFn, batches: Sequence[Batch]) -> float:
    """Mean loss over the held-out batches."""
    return statistics.fmean(float(loss_fn(params, batch)) for batch in batches)


def report(config: Config, corpus: Corpus, runs: Sequence[Run], console: Console):
    """Prints the table and its reading, draws the picture, writes the summary."""
    results = {run.name: summarise(run, config) for run in runs}
    console.print(table(results, [str(burst) for burst in config.bursts]))
    console.print(reading(results))
    out = Path(config.out)
    draw(runs, config, out / "pretrain.png")
    summary = {
        "config": dataclasses.asdict(config),
        "corpus": str(corpus),
        "versions": versions(),
        "hardware": hardware(),
        "results": results,
        "reading": reading(results),
    }
    write_summary(summary, out / "summary.json")
    console.print(f"Written to {out}: pretrain.png, summary.json and a log per clipper")


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains every chosen clipper, then compares them."""
    description = (__doc__ or "").partition("\n\nResults")[0]
    config = parse_config(
        Config, description=description, quick=QUICK, arguments=arguments
    )
    console = new_console()
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus(config.data)
    console.print(f"{corpus}\nhardware: {hardware()}")
    initial, loss_fn = new_model(config)
    held_out = validation_batches(
        corpus.validation,
        batches=config.validation_batches,
        batch_size=config.batch_size,
        length=config.length,
    )
    validation_loss = jax.jit(loss_fn)

    runs = []
    with Live(console, config.steps) as live:
        for name in config.clip:
            run, params = train(name, config, corpus, initial, loss_fn, live)
            if run.stopped:
                console.print(f"{name}: {run.stopped}", style="bold red")
            else:
                run.validation_loss = validate(params, validation_loss, held_out)
            write_log(run, out / f"{name}.jsonl")
            runs.append(run)
    report(config, corpus, runs, console)


if __name__ == "__main__":
    main()
