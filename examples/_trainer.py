"""One run: one clipper from one start, block by block, with everything that is kept."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from _analysis import Run
from _asked_loggers import open_loggers
from _checkpoint import Checkpoints, StepLog
from _clippers import clip_numbers, slug
from _config import Config
from _data import Batch, Corpus
from _interrupt import Interrupt, Interrupted
from _job import Job, LossFn
from _loggers import Logger
from _mesh import Placement, anywhere
from _optimizers import new_optimizer
from _recovery import Recovery
from _report import Live, write_log
from _same import checkpoint_folder, settings_of

import adagc_jax


@dataclasses.dataclass(frozen=True)
class Bench:
    """What all runs of a command share.

    Attributes:
      corpus: The text.
      placement: Where arrays live.
      compiled: The compiled step of each clipper that has had a run.
      live: Shows progress.
      interrupt: Whether Ctrl-C was pressed.
    """

    corpus: Corpus
    placement: Placement
    compiled: dict[str, jax.stages.Compiled]
    live: Live
    interrupt: Interrupt


def nonfinite(grads: Any) -> dict[str, jax.Array]:
    """Whether each tensor's gradient, by path, holds a NaN or an infinity."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): ~jax.numpy.isfinite(
            g
        ).all()
        for path, g in jax.tree_util.tree_leaves_with_path(grads)
    }


def new_train_step(
    optimizer: optax.GradientTransformationExtraArgs,
    loss_fn: LossFn,
    out_shardings: Any = None,
) -> jax.stages.Wrapped:
    """One step: loss, gradients, clip, optimizer; and the numbers for the log."""
    placed = {} if out_shardings is None else {"out_shardings": (*out_shardings, None)}

    @functools.partial(jax.jit, donate_argnums=(0, 1), **placed)
    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, loss=loss)
        params = optax.apply_updates(params, updates)
        numbers = {"loss": loss, **clip_numbers(opt_state, params)}
        if isinstance(opt_state, adagc_jax.GuardState):
            numbers |= adagc_jax.guard_metrics(opt_state)
        return params, opt_state, (numbers, nonfinite(grads))

    return train_step


class Trainer:
    """Trains with one clipper from the start of a job, or from a checkpoint of it."""

    def __init__(self, name: str, config: Config, job: Job, bench: Bench):
        self.run, self.config, self.bench, self._job = Run(name), config, bench, job
        self.recovery = Recovery(config)
        self.block_ms: list[float] = []
        self.checkpoints = checkpoints_of(name, config, bench.corpus)
        notes = self.checkpoints.notes(config.resume)
        self.optimizer = new_optimizer(name, config)
        # The step donates its inputs, and the next clipper needs the same start.
        params = jax.tree.map(jax.numpy.copy, job.initial)
        self.state = params, bench.placement.state(self.optimizer, params)
        self.first = notes.get("step", 0)
        if notes:
            self.state = self.checkpoints.state(self.first, self.state)
        path = Path(config.out) / f"{slug(name)}.jsonl"
        self.log = StepLog(path, notes.get("lines", 0))
        self.digest = hashlib.sha256()
        self._go_on(notes)

    def _compiled(self) -> jax.stages.Compiled:
        """A clipper's step, compiled once for all seeds."""
        name, place, known = self.run.name, self.bench.placement, self.bench.compiled
        started = time.perf_counter()
        if name not in known:
            outputs = place.outputs(*self.state)
            step = new_train_step(self.optimizer, self._job.loss_fn, outputs)
            known[name] = step.lower(*self.state, self._batch(0)).compile()
            self.run.compile_seconds = time.perf_counter() - started
        return known[name]

    def _batch(self, index: int) -> Any:
        batch = self.config.batch(self.bench.corpus, index)
        return self.bench.placement.batch(batch)

    def _go_on(self, notes: dict[str, Any]) -> None:
        """The run as it was at the checkpoint."""
        self.run.rows.extend(self.log.rows)
        self.run.log.extend(self.log.rows)
        self.block_ms += notes.get("block_ms", [])
        for step in range(self.first):
            batch = self.config.batch(self.bench.corpus, step)
            self.digest.update(np.stack(batch).tobytes())

    def train(self) -> tuple[Run, Any]:
        """Trains to the end; returns the log and the final parameters."""
        config, run = self.config, self.run
        self.bench.live.begin(run.name)
        with contextlib.ExitStack() as closing:
            opened = open_loggers(config, run.name, self.first)
            loggers = [closing.enter_context(logger) for logger in opened]
            closing.callback(self.checkpoints.close)
            while self.first < config.steps and not run.stopped:
                end = min(self.first + config.log_every, config.steps)
                steps = range(self.first, end)
                self._block(steps, loggers)
                self._keep(steps)
        if run.rollbacks:
            # What was undone is known only now.
            write_log(run, self.log.path)
        run.ms_per_step = statistics.median(self.block_ms)
        run.batches_sha256 = self.digest.hexdigest()
        return run, self.state[0]

    def _block(self, steps: range, loggers: Sequence[Logger]) -> None:
        run, pending = self.run, []
        train_step = self._compiled()
        started = time.perf_counter()
        for step in steps:
            self.recovery.keep(step, self.state)
            batch = self.config.batch(self.bench.corpus, step + self.recovery.ahead)
            self.digest.update(np.stack(batch).tobytes())
            *state, numbers = train_step(*self.state, self.bench.placement.batch(batch))
            self.state = tuple(state)
            pending.append(numbers)
        # Waiting once per block keeps the device busy while Python runs ahead.
        fetched = jax.device_get(pending)
        self.block_ms.append(1e3 * (time.perf_counter() - started) / len(steps))
        logged = len(run.log)
        for step, numbers in zip(steps, fetched, strict=True):
            run.add(self.recovery.where(step), *numbers)
        new = run.log[logged:]
        self.log.add(new)
        # Counts on after a rollback: loggers take no step twice.
        for count, row in enumerate(new, start=logged):
            for logger in loggers:
                logger(count, _scalars(row))
        self.bench.live.update(run.name, run.rows[-1], self.block_ms[-1] / 1e3)

    def _keep(self, steps: range) -> None:
        """Rollback, checkpoint, and the end if Ctrl-C was pressed."""
        self.first = steps.stop
        if back := self.recovery.go_back(self.run):
            self.state, self.first = back.tree, back.step
            self.bench.live.say_rollback(self.run.name, self.run.rollbacks[-1])
        if self.run.stopped:
            return
        asked = anywhere(self.bench.interrupt.asked)
        why_not = why_no_checkpoint(self.config) if asked else ""
        if self.checkpoints.is_due(steps, self.config.steps) or (asked and not why_not):
            self.checkpoints.save(
                self.first, self.state, lines=self.log.lines, block_ms=self.block_ms
            )
        if asked:
            left = why_not or "a checkpoint is written"
            raise Interrupted(
                f"{self.run.name}: stopped before step {self.first}; {left}"
            )


def checkpoints_of(name: str, config: Config, corpus: Corpus) -> Checkpoints:
    """The checkpoints of one clipper's run."""
    folder = checkpoint_folder(name, config.out)
    settings = settings_of(name, config, corpus)
    return Checkpoints(folder, config.checkpoint_every, settings)


def why_no_checkpoint(config: Config) -> str:
    """Why Ctrl-C can leave none, if so."""
    if config.rollback:
        return "--rollback has its snapshots in memory, so this run has no checkpoint"
    if config.distributed:
        return "of several processes there is no checkpoint"
    if importlib.util.find_spec("orbax") is None:
        return "no checkpoint without orbax: pip install orbax-checkpoint"
    return ""


def _scalars(row: dict[str, Any]) -> dict[str, float]:
    return {
        key: value
        for key, value in row.items()
        if isinstance(value, float | int) and key != "step"
    }


def validate(params: Any, loss_fn: LossFn, batches: Iterable[Batch]) -> float:
    """Mean loss over the held-out batches."""
    return statistics.fmean(float(loss_fn(params, batch)) for batch in batches)
