"""Programs of a grid: settings that can share one, and what it counts.

Settings that differ in numbers which a program can take at run time are one program,
mapped over these numbers; the others are programs of their own.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adagc_jax.replay.engine import (
    CHUNK,
    Inputs,
    Progress,
    chunks,
    initial_state,
    step,
)
from adagc_jax.replay.history import History
from adagc_jax.replay.spikes import SpikeMeasure, levels_of
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


def families_of(variants: Sequence[Variant]) -> list[list[int]]:
    """Indices of variants that can share a program."""
    families: dict[Any, list[int]] = {}
    for index, variant in enumerate(variants):
        fixed = [(k, v) for k, v in variant.values.items() if not _is_traced(k, v)]
        families.setdefault((variant.method, tuple(fixed)), []).append(index)
    return list(families.values())


def _is_traced(name: str, value: Any) -> bool:
    return name in _TRACED and value is not None


class Program:
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
        """Counts of every variant; ``scored_from`` is a row."""
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
