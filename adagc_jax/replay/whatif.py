"""The grid: many settings on the same norms, each boiled down to counts per tensor.

Settings that differ in numbers which a program can take at run time are one program,
mapped over these numbers; the others are programs of their own, run side by side.
Scales are not kept: a hundred thousand steps of a grid would fill the memory.
"""

import itertools
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adagc_jax.checks import check_choice
from adagc_jax.replay.engine import (
    CHUNK,
    Inputs,
    Progress,
    chunks,
    initial_state,
    step,
)
from adagc_jax.replay.history import History
from adagc_jax.replay.spikes import SpikeMeasure, levels_of, spike_levels
from adagc_jax.replay.tally import Tally, counted, no_tally
from adagc_jax.replay.variants import Variant

# Numbers that give the same bits traced as written into the program: not beta, whose
# complement is rounded once if it is known, nor what is divided by or a power.
_TRACED = (
    "lambda_rel",
    "lambda_abs",
    "warmup_steps",
    "max_norm",
    "alpha",
    "max_grad_norm",
    "clip_factor",
)


class WhatIf(NamedTuple):
    """A grid of settings and what each would have done.

    Attributes:
      variants: The settings.
      names: Of the tensors; a rule on the whole tree counts for each of them.
      tally: Counts of each setting, NumPy [variants, tensors].
      scored_from: Row of the first update that is scored.
      measure: What counts as a spike.
    """

    variants: tuple[Variant, ...]
    names: tuple[str, ...]
    tally: Tally
    scored_from: int
    measure: SpikeMeasure

    @property
    def clip_rate(self) -> np.ndarray:
        """Share of active gradients that were clipped, f64[variants]."""
        return _share(self.tally.clipped, self.tally.active)

    @property
    def held(self) -> np.ndarray:
        """Share of the spikes that were held, f64[variants]; NaN without spikes."""
        return _share(self.tally.held, self.tally.spikes)

    @property
    def ordinary_clip_rate(self) -> np.ndarray:
        """Share of ordinary gradients that were clipped, f64[variants]."""
        return _share(self.tally.ordinary_clipped, self.tally.ordinary)

    @property
    def ordinary_loss(self) -> np.ndarray:
        """Share of ordinary norms that was taken off them, f64[variants]."""
        return _share(self.tally.ordinary_loss, self.tally.ordinary)


def what_if(
    history: History,
    variants: Sequence[Variant],
    *,
    measure: SpikeMeasure | None = None,
    nonfinite: str = "zero",
    progress: Progress | None = None,
) -> WhatIf:
    """What each of some settings would have done with the norms of a run.

    Args:
      history: Of `read_history`.
      variants: Of `make_grid` or `make_variant`.
      measure: What counts as a spike.
      nonfinite: Policy for NaN and infinite norms, as in `clip_by_rule`.
      progress: Called now and then with the number of steps made since, counted for
        every setting.

    Returns:
      A `WhatIf` of counts, the same that `replay` would give setting by setting.

    Raises:
      ValueError: for no variants, no steps or an unknown policy.

    Example:
      >>> import numpy as np
      >>> from adagc_jax.replay import History, make_grid, make_variant
      >>> steps, norm = np.arange(300), np.ones((300, 1), np.float32)
      >>> norm[200] = 8.0
      >>> history = History(("w",), steps, steps, norm, np.zeros(300, np.float32))
      >>> grid = make_grid(make_variant("tensor_gc"), {"max_norm": (0.5, 1.0, 8.0)})
      >>> result = what_if(history, grid)
      >>> result.held, result.ordinary_loss
      (array([1., 1., 0.]), array([0.5, 0. , 0. ]))
    """
    check_choice("nonfinite", nonfinite, ("zero", "skip", "propagate"))
    if not variants or not len(history.steps):
        raise ValueError("what_if needs at least one variant and one step.")
    measure = measure or SpikeMeasure()
    levels = spike_levels(history, measure)
    lock = threading.Lock()

    def tick(steps: int) -> None:
        with lock:
            if progress is not None:
                progress(steps)

    scored_from = _scored_from(history, variants, measure)
    families = _families(variants)

    def run(family: list[int]) -> Tally:
        program = _Program([variants[i] for i in family], nonfinite, measure)
        return program.run(history, levels, scored_from, tick)

    # XLA works on one such program with one core.
    with ThreadPoolExecutor(min(len(families), os.cpu_count() or 1)) as pool:
        tallies = list(pool.map(run, families))
    order = np.argsort(list(itertools.chain(*families)))
    tally = jax.tree.map(lambda *x: np.concatenate(x)[order], *tallies)
    return WhatIf(tuple(variants), history.names, tally, scored_from, measure)


def _scored_from(
    history: History, variants: Sequence[Variant], measure: SpikeMeasure
) -> int:
    warmup = max(int(v.values.get("warmup_steps", 0)) for v in variants)
    after = int(np.searchsorted(history.updates, warmup))
    return max(after, measure.window)


def _families(variants: Sequence[Variant]) -> list[list[int]]:
    """Indices of variants that can share a program."""
    families: dict[Any, list[int]] = {}
    for index, variant in enumerate(variants):
        fixed = [(k, v) for k, v in variant.values.items() if not _is_traced(k, v)]
        families.setdefault((variant.method, tuple(fixed)), []).append(index)
    return list(families.values())


def _is_traced(name: str, value: Any) -> bool:
    return name in _TRACED and value is not None


class _Program:
    """One program for a family of variants."""

    def __init__(
        self, variants: Sequence[Variant], nonfinite: str, measure: SpikeMeasure
    ):
        self.variant, self.count = variants[0], len(variants)
        self.nonfinite, self.measure = nonfinite, measure
        names = [k for k, v in self.variant.values.items() if _is_traced(k, v)]
        self.traced = {
            name: jnp.asarray([v.values[name] for v in variants], jnp.float32)
            for name in names
        }

    def run(
        self,
        history: History,
        levels: np.ndarray,
        scored_from: int,
        progress: Progress,
    ) -> Tally:
        size = min(CHUNK, len(history.steps))
        seen = history.whole() if self.variant.whole else history
        state = initial_state(self.variant.rule(), self.variant.whole, len(seen.names))
        carry = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (self.count, *x.shape)),
            (state, no_tally(len(history.names))),
        )
        run_chunk = jax.jit(self._chunk, donate_argnums=0)
        start = 0
        for inputs, count in chunks(seen, size):
            rows = slice(start, start + count)
            extra = (
                _padded(history.norm[rows], size),
                _padded(levels_of(levels, self.measure, rows), size, np.inf),
                np.arange(start, start + size) >= scored_from,
            )
            carry = run_chunk(carry, inputs, extra)
            # Without waiting, the chunks would queue up in memory.
            jax.block_until_ready(carry)
            start += count
            progress(count * self.count)
        return jax.tree.map(np.asarray, carry[1])

    def _chunk(self, carry: Any, inputs: Inputs, extra: Any) -> Any:
        def one(traced: dict[str, Any], carry: Any, x: Any) -> Any:
            (state, tally), (step_inputs, (norm, level, scored)) = carry, x
            rule = self.variant.rule(**traced)
            state, outcome = step(
                rule, self.variant.whole, self.nonfinite, state, step_inputs
            )
            return state, counted(tally, outcome, norm, level, scored, self.measure)

        def body(carry: Any, x: Any) -> tuple[Any, None]:
            return jax.vmap(one, in_axes=(0, 0, None))(self.traced, carry, x), None

        return jax.lax.scan(body, carry, (inputs, extra))[0]


def _padded(array: np.ndarray, size: int, value: float = 0.0) -> np.ndarray:
    rows = size - len(array)
    return np.pad(array, [(0, rows), (0, 0)], constant_values=value) if rows else array


def _share(part: np.ndarray, of: np.ndarray) -> np.ndarray:
    part, of = part.sum(axis=1, dtype=np.float64), of.sum(axis=1, dtype=np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(of > 0, part / of, np.nan)
