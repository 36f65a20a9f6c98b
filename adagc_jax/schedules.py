"""Learning-rate schedules: a warm-up, a cosine decay, and a floor.

A schedule is a function from the step to the learning rate, as in optax, whose
pieces give the shapes here. This module only places those between the values at
the ends so that they are met exactly, and joins them. It stands beside the
clipping, not in it: clip first, then scale by the schedule.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import jax.typing
import numpy as np
import optax

from adagc_jax.checks import check_int

# optax's own alias promises less than an array, and so hides `.dtype` from checkers.
Schedule: TypeAlias = Callable[[jax.typing.ArrayLike], jax.Array]

_LAST_STEP = 2**31 - 1  # Steps are int32 in optax.
# Each restart adds its own few operations to the compiled training step.
_MOST_CYCLES = 100


@dataclass(frozen=True)
class Restarts:
    """Warm restarts (SGDR): the cosine decay starts over, cycle after cycle.

    Cycle k = 0, 1, … lasts period * multiplier^k steps and starts from
    peak * peak_decay^k, or from the floor if that is higher. A cycle that would not
    fit is not started: the last one is stretched to end with the training.

    Args:
      period: Steps of the first cycle, which begins after the warm-up.
      multiplier: Growth of the cycles, at least 1.
      peak_decay: Factor on the peak from cycle to cycle, in (0, 1].
      warmup: Steps of every cycle but the first that lead linearly from the floor
        back to the peak, in [0, period). With 0 the rate jumps, as in the paper.

    Raises:
      ValueError: If an argument is outside its range.

    Example:
      >>> restarts = Restarts(period=100, multiplier=2.0, peak_decay=0.5)
      >>> lr = warmup_cosine(1.0, 700, warmup=0, restarts=restarts)
      >>> print([round(float(lr(step)), 3) for step in (0, 99, 100, 300, 700)])
      [1.0, 0.1, 0.5, 0.25, 0.1]

    Reference:
      SGDR, https://arxiv.org/abs/1608.03983
    """

    period: int
    multiplier: float = 1.0
    peak_decay: float = 1.0
    warmup: int = 0

    def __post_init__(self):
        """Refuses cycles that would vanish, or never reach their peak."""
        check_int("period", self.period, 1, _LAST_STEP)
        _check_real("multiplier", self.multiplier, 1.0, _LAST_STEP)
        _check_real("peak_decay", self.peak_decay, 0.0, 1.0)
        if self.peak_decay == 0:
            raise ValueError(f"peak_decay must be in (0, 1], got {self.peak_decay!r}")
        check_int("warmup", self.warmup, 0, self.period - 1)


def warmup_cosine(
    peak: Any,
    total_steps: int,
    *,
    warmup: float = 0.05,
    floor: Any = None,
    floor_value: Any = None,
    init_value: Any = 0.0,
    restarts: Restarts | None = None,
) -> Schedule:
    """Linear warm-up to the peak, cosine decay to the floor, then the floor.

    With W warm-up steps out of T and the floor f,

        lr(t) = init_value + (peak - init_value) * t / W                    t < W
                f + (peak - f) * (1 + cos(pi * (t - W) / (T - W))) / 2      W <= t < T
                f                                                           T <= t

    exactly at t = 0, W and T, to rounding in between. As in optax, step 0 has the
    rate `init_value`; with the default of 0 the first step moves nothing, and
    `init_value=peak / W` makes use of it. With W = 0 step 0 has the peak.

    Args:
      peak: The highest rate, at least 0. It, the floor and init_value may be traced.
      total_steps: T, at least 1. The floor holds from this step on, whatever W.
      warmup: A float in [0, 1) is the fraction of T, rounded to whole steps; an int
        in [0, T] is W. With W = T the rate drops from the warm-up to the floor.
      floor: f as a fraction of the peak, in [0, 1]; 0.1 if no floor is given.
      floor_value: f itself, in [0, peak], instead of `floor`.
      init_value: The rate at step 0, in [0, peak].
      restarts: None decays once; see `Restarts`.

    Returns:
      A schedule: step (int, or int array of any shape, traced or not; negative
      counts as 0) -> rate of the same shape, in JAX's default float dtype.

    Raises:
      ValueError: If an argument is outside its range, or both floors are given.

    Example:
      >>> lr = warmup_cosine(3e-4, 10_000)
      >>> print([f"{1e4 * float(lr(step)):.2f}" for step in (0, 250, 500, 10_000)])
      ['0.00', '1.50', '3.00', '0.30']

    Reference:
      SGDR, https://arxiv.org/abs/1608.03983
    """
    check_int("total_steps", total_steps, 1, _LAST_STEP)
    _check_real("peak", peak, 0.0, np.finfo(np.float32).max)
    low = _floor(peak, floor, floor_value)
    _check_real("init_value", init_value, 0.0, peak)
    start = _warmup_steps(warmup, total_steps)

    phases, ends = [], []
    if start > 0:
        phases.append(_line(init_value, peak, start))
        ends.append(start)
    for number, end in enumerate(_cycle_ends(restarts, start, total_steps)):
        top, again = peak, 0
        if restarts is not None and number > 0:
            top, again = peak * restarts.peak_decay**number, restarts.warmup
        if again > 0:
            phases.append(_line(low, top, again))
            ends.append(start + again)
        phases.append(_cosine(low, top, end - start - again))
        ends.append(end)
        start = end
    phases.append(lambda step: jnp.asarray(low, float))
    joined = optax.join_schedules(phases, ends)

    def schedule(step):
        # Clipped while still an integer: no step, however late, overflows below.
        xp = jnp if isinstance(step, jax.Array) else np
        return jnp.asarray(joined(xp.clip(step, 0, total_steps)))

    return schedule


def _line(low: Any, high: Any, steps: int) -> Schedule:
    return _between(low, high, optax.linear_schedule(0.0, 1.0, steps))


def _cosine(low: Any, high: Any, steps: int) -> Schedule:
    return _between(low, high, optax.cosine_decay_schedule(1.0, steps))


def _between(low: Any, high: Any, weight: optax.Schedule) -> Schedule:
    """Goes from low to high with a weight in [0, 1], exactly so at 0 and 1."""

    def schedule(step):
        share = jnp.asarray(weight(jnp.asarray(step, float)))
        bottom = jnp.asarray(low, float)
        top = jnp.maximum(jnp.asarray(high, float), bottom)
        # bottom + (top - bottom) does not always round to the top.
        return jnp.where(share < 1, bottom + (top - bottom) * share, top)

    return schedule


def _cycle_ends(restarts: Restarts | None, start: int, total: int) -> list[int]:
    if restarts is None:
        return [total] if start < total else []
    check_int("restarts.period", restarts.period, 1, total - start)
    ends, length = [], float(restarts.period)
    while start + length <= total and len(ends) <= _MOST_CYCLES:
        start += round(length)
        length *= restarts.multiplier
        ends.append(start)
    if len(ends) > _MOST_CYCLES:
        raise ValueError(
            f"restarts must make at most {_MOST_CYCLES} cycles in {total} steps, "
            f"got {restarts!r}: raise its period or multiplier"
        )
    return [*ends[:-1], total]


def _warmup_steps(warmup: float, total: int) -> int:
    if isinstance(warmup, float):
        if not 0 <= warmup < 1:
            raise ValueError(
                "warmup must be a fraction in [0, 1) if a float, or an int number "
                f"of steps, got {warmup!r}"
            )
        return round(warmup * total)
    check_int("warmup", warmup, 0, total)
    return warmup


def _floor(peak: Any, floor: Any, floor_value: Any) -> Any:
    if floor is not None and floor_value is not None:
        raise ValueError(
            "floor and floor_value exclude each other, "
            f"got floor={floor!r} and floor_value={floor_value!r}"
        )
    if floor_value is not None:
        _check_real("floor_value", floor_value, 0.0, peak)
        return floor_value
    floor = 0.1 if floor is None else floor
    _check_real("floor", floor, 0.0, 1.0)
    return floor * peak


def _check_real(name: str, value: Any, low: Any, high: Any) -> None:
    if any(isinstance(x, jax.core.Tracer) for x in (value, low, high)):
        return
    # As Python floats, since arrays of two dtypes do not compare in JAX's strict mode.
    if not float(low) <= float(value) <= float(high):
        raise ValueError(
            f"{name} must be in [{float(low):g}, {float(high):g}], got {value!r}"
        )
