"""The grid: many settings on the same norms, each boiled down to counts per tensor.

Scales are not kept: a hundred thousand steps of a grid would fill the memory. The
programs run side by side.
"""

import itertools
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np

from adagc_jax.checks import check_choice
from adagc_jax.replay.engine import Progress
from adagc_jax.replay.history import History
from adagc_jax.replay.programs import Program, families_of
from adagc_jax.replay.spikes import SpikeMeasure, spike_levels, spike_rows
from adagc_jax.replay.tally import Tally
from adagc_jax.replay.variants import Variant


class WhatIf(NamedTuple):
    """A grid of settings and what each would have done.

    Attributes:
      variants: The settings.
      names: Of the tensors; a rule on the whole tree counts for each of them.
      tally: Counts of each setting, NumPy [variants, tensors].
      scored_from: Row of the first update that is scored, the same for all settings.
      measure: What counts as a spike.
      scored: Which settings are: the others have a warm-up that would leave too little
        for any of them, so that what they hold and cost is NaN, bool[variants].
      steps: Logged step of every update.
      left_out: Spikes before ``scored_from``.
    """

    variants: tuple[Variant, ...]
    names: tuple[str, ...]
    tally: Tally
    scored_from: int
    measure: SpikeMeasure
    scored: np.ndarray
    steps: np.ndarray
    left_out: int

    @property
    def spikes(self) -> int:
        """Spikes that are scored: the same for all settings."""
        return int(self.tally.spikes[0].sum())

    @property
    def clip_rate(self) -> np.ndarray:
        """Share of active gradients that were clipped, f64[variants]."""
        return _share(self.tally.clipped, self.tally.active)

    @property
    def held(self) -> np.ndarray:
        """Share of the spikes that were held, f64[variants]; NaN without spikes."""
        return self._of_scored(_share(self.tally.held, self.tally.spikes))

    @property
    def ordinary_clip_rate(self) -> np.ndarray:
        """Share of ordinary gradients that were clipped, f64[variants]."""
        return self._of_scored(_share(self.tally.ordinary_clipped, self.tally.ordinary))

    @property
    def ordinary_loss(self) -> np.ndarray:
        """Share of ordinary norms that was taken off them, f64[variants]."""
        return self._of_scored(_share(self.tally.ordinary_loss, self.tally.ordinary))

    @property
    def leak(self) -> np.ndarray:
        """Largest spike that came through, in units of its level, f64[variants]."""
        return self._of_scored(self.tally.leak.max(axis=1, initial=0.0))

    def _of_scored(self, numbers: np.ndarray) -> np.ndarray:
        return np.where(self.scored, numbers, np.nan)


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
      A `WhatIf` of counts, the same that `replay` would give setting by setting. Spikes
      and costs are counted from the same update on for all settings: after the first
      window of the measure and the longest warm-up that leaves at least half of the
      spikes that the shortest one leaves. Settings with a longer one are not scored.

    Raises:
      ValueError: for no variants, no steps, no tensors or an unknown policy.

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
    if not variants or not history.norm.size:
        raise ValueError(
            "what_if needs at least one variant, one step and one tensor, got "
            f"{len(variants)}, {len(history.steps)} and {len(history.names)}."
        )
    measure = measure or SpikeMeasure()
    spikes = spike_rows(history, measure)
    starts = _starts(history, variants, measure)
    scored_from = _scored_from(starts, spikes, len(history.steps))
    levels = spike_levels(history, measure)
    lock = threading.Lock()

    def tick(steps: int) -> None:
        with lock:
            if progress is not None:
                progress(steps)

    families = families_of(variants)

    def run(family: list[int]) -> Tally:
        program = Program([variants[i] for i in family], nonfinite, measure)
        return program.run(history, levels, scored_from, tick)

    # XLA works on one such program with one core.
    with ThreadPoolExecutor(min(len(families), os.cpu_count() or 1)) as pool:
        tallies = list(pool.map(run, families))
    order = np.argsort(list(itertools.chain(*families)))
    tally = jax.tree.map(lambda *x: np.concatenate(x)[order], *tallies)
    return WhatIf(
        variants=tuple(variants),
        names=history.names,
        tally=tally,
        scored_from=scored_from,
        measure=measure,
        scored=(starts <= scored_from) & (scored_from < len(history.steps)),
        steps=history.steps,
        left_out=int((spikes < scored_from).sum()),
    )


def _starts(
    history: History, variants: Sequence[Variant], measure: SpikeMeasure
) -> np.ndarray:
    """For each variant the row from which on it could be scored."""
    warmups = [int(v.values.get("warmup_steps", 0)) for v in variants]
    return np.maximum(np.searchsorted(history.updates, warmups), measure.window)


def _scored_from(starts: np.ndarray, spikes: np.ndarray, steps: int) -> int:
    """The row from which on all are scored: see `what_if`."""
    wanted = (spikes >= starts.min()).sum() / 2
    left = {int(start): (spikes >= start).sum() for start in starts if start < steps}
    return max((s for s, count in left.items() if count >= wanted), default=steps)


def _share(part: np.ndarray, of: np.ndarray) -> np.ndarray:
    part, of = part.sum(axis=1, dtype=np.float64), of.sum(axis=1, dtype=np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(of > 0, part / of, np.nan)
