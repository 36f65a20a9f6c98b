"""One run: one clipper from one start, block by block, with everything that is kept."""

import dataclasses
import functools
import hashlib
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from _analysis import Run
from _checkpoint import Checkpoints, StepLog, fingerprint
from _clippers import clip_numbers, slug
from _config import Config
from _data import Batch, Corpus
from _interrupt import Interrupt, Interrupted
from _job import Job, LossFn
from _loggers import Logger, open_loggers
from _mesh import Placement
from _optimizers import new_optimizer
from _recovery import Recovery
from _report import Live, write_log

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
        self.run, self.config, self.bench = Run(name), config, bench
        self.recovery = Recovery(config)
        self.block_ms: list[float] = []
        out = Path(config.out)
        self.checkpoints = Checkpoints(
            out / "checkpoints" / slug(name),
            config.checkpoint_every,
            fingerprint(config) | {"clip": name},
        )
        optimizer = new_optimizer(name, config)
        # The step donates its inputs, and the next clipper needs the same start.
        params = jax.tree.map(jax.numpy.copy, job.initial)
        fresh = params, bench.placement.state(optimizer, params)
        self.step = self._compiled(optimizer, job.loss_fn, fresh)
        self.state, notes = self.checkpoints.start(config.resume, fresh)
        self.first = notes.get("step", 0)
        self.log = StepLog(out / f"{slug(name)}.jsonl", notes.get("lines", 0))
        self.digest = hashlib.sha256()
        self._go_on(notes)

    def _compiled(
        self, optimizer: Any, loss_fn: LossFn, state: Any
    ) -> jax.stages.Compiled:
        """A clipper's step, compiled once for all seeds."""
        name, place = self.run.name, self.bench.placement
        started = time.perf_counter()
        if name not in self.bench.compiled:
            step = new_train_step(optimizer, loss_fn, place.outputs(*state))
            lowered = step.lower(*state, self._batch(0))
            self.bench.compiled[name] = lowered.compile()
            self.run.compile_seconds = time.perf_counter() - started
        return self.bench.compiled[name]

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
        loggers = open_loggers(config, run.name)
        while self.first < config.steps and not run.stopped:
            steps = range(self.first, min(self.first + config.log_every, config.steps))
            self._block(steps, loggers)
            self._keep(steps)
        for logger in loggers:
            logger.close()
        self.checkpoints.close()
        if run.rollbacks:
            # What was undone is known only now.
            write_log(run, self.log.path)
        run.ms_per_step = statistics.median(self.block_ms)
        run.batches_sha256 = self.digest.hexdigest()
        return run, self.state[0]

    def _block(self, steps: range, loggers: Sequence[Logger]) -> None:
        run, pending = self.run, []
        started = time.perf_counter()
        for step in steps:
            self.recovery.keep(step, self.state)
            batch = self.config.batch(self.bench.corpus, step + self.recovery.ahead)
            self.digest.update(np.stack(batch).tobytes())
            *state, numbers = self.step(*self.state, self.bench.placement.batch(batch))
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
        for logger in loggers:
            for row in new:
                logger(row["step"], _scalars(row))
        self.bench.live.update(run.name, run.rows[-1], self.block_ms[-1] / 1e3)

    def _keep(self, steps: range) -> None:
        """Rollback, checkpoint, and the end if Ctrl-C was pressed."""
        self.first = steps.stop
        if back := self.recovery.go_back(self.run):
            self.state, self.first = back.tree, back.step
            self.bench.live.say_rollback(self.run.name, self.run.rollbacks[-1])
        if self.run.stopped:
            return
        asked = self.bench.interrupt.asked
        if self.checkpoints.is_due(steps) or asked:
            self.checkpoints.save(
                self.first, self.state, lines=self.log.lines, block_ms=self.block_ms
            )
        if asked:
            self.checkpoints.close()
            raise Interrupted(f"{self.run.name}: stopped before step {self.first}")


def _scalars(row: dict[str, Any]) -> dict[str, float]:
    return {
        key: value
        for key, value in row.items()
        if isinstance(value, float | int) and key != "step"
    }


def validate(params: Any, loss_fn: LossFn, batches: Sequence[Batch]) -> float:
    """Mean loss over the held-out batches."""
    return statistics.fmean(float(loss_fn(params, batch)) for batch in batches)
