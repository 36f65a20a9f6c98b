"""Rolling windows behind the spike rules: scores of values against those before.

Two computations of the same numbers: a ring buffer, one value at a time, in JAX, and
sliding sums over a whole series in float64 NumPy.
"""

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from adagc_jax.spikes import SpikeRule

# Beyond this a squared deviation may overflow float64: no loss, as bad as inf.
_HUGE = 1e150


class SpikeFlags(NamedTuple):
    """What `SpikeScore` is made of, in arrays of fixed size that `jit` can return.

    Attributes:
      is_spike: bool `[steps]`.
      z: float `[steps]`, as in `SpikeScore`.
      scored: bool `[steps]`, the steps that had enough history, or were not finite.
    """

    is_spike: Any
    z: Any
    scored: Any


class SpikeMonitorState(NamedTuple):
    """The last values of a series.

    Attributes:
      values: float32 (or the chosen dtype) `[window]`, a ring buffer.
      seen: int32 `[]`, how many values have entered the window so far.
    """

    values: jax.Array
    seen: jax.Array


def monitor_step(
    rule: "SpikeRule", value: Any, include: Any, state: SpikeMonitorState
) -> tuple[SpikeFlags, SpikeMonitorState]:
    """Scores one value against the ring buffer, and lets it in."""
    value = jnp.asarray(value, state.values.dtype)
    include = jnp.asarray(include, bool)
    # Half the range, so that the difference of two values is finite as well.
    finite = jnp.abs(value) < jnp.finfo(value.dtype).max / 2
    enters = include & finite
    slot = state.seen % rule.window
    kept = jnp.where(enters, value, state.values[slot])
    new = SpikeMonitorState(
        state.values.at[slot].set(kept), state.seen + enters.astype(jnp.int32)
    )
    past = state if rule.previous_only else new
    scored = include & (~finite | (past.seen >= rule.history))
    z = jnp.where(finite, _window_z(rule, value, past), jnp.inf)
    z = jnp.where(scored, z, 0.0)
    return SpikeFlags(rule.beyond(z), z, scored), new


def _window_z(
    rule: "SpikeRule", value: jax.Array, past: SpikeMonitorState
) -> jax.Array:
    filled = jnp.minimum(past.seen, rule.window)
    valid = jnp.arange(rule.window, dtype=jnp.int32) < filled
    # Deviations from a member of the window are exact zeros in a constant window,
    # and in units of the largest their squares neither overflow nor vanish.
    pivot = past.values[0]
    deviations = jnp.where(valid, past.values - pivot, 0.0)
    largest = jnp.max(jnp.abs(deviations))
    constant = largest == 0
    unit = jnp.where(constant, 1.0, largest)
    deviations = deviations / unit
    mean = jnp.sum(deviations) / jnp.maximum(filled, 1).astype(value.dtype)
    squares = jnp.sum(jnp.where(valid, (deviations - mean) ** 2, 0.0))
    freedom = jnp.maximum(filled - rule.ddof, 1).astype(value.dtype)
    std = jnp.where(constant, 1.0, jnp.sqrt(squares / freedom))
    jump = value - pivot
    off_constant = jnp.where(jump == 0, 0.0, jnp.copysign(jnp.inf, jump))
    return jnp.where(constant, off_constant, (jump / unit - mean) / std)


@functools.partial(jax.jit, static_argnums=0)
def flags_jax(rule: "SpikeRule", series: jax.Array, mask: jax.Array) -> SpikeFlags:
    """Flags a series by running the monitor over it."""
    dtype = series.dtype if series.dtype == jnp.float64 else jnp.float32

    def body(state, step):
        value, include = step
        flags, state = monitor_step(rule, value, include, state)
        return state, flags

    return jax.lax.scan(body, rule.monitor(dtype).init(), (series, mask))[1]


def flags_numpy(rule: "SpikeRule", series: np.ndarray, mask: np.ndarray) -> SpikeFlags:
    """Flags a series in float64, in time proportional to its length."""
    series = series.astype(np.float64)
    enters = mask & (np.abs(series) < _HUGE)
    ends = np.cumsum(enters) - (enters if rule.previous_only else 0)
    scored = mask & (~enters | (ends >= rule.history))
    z = np.zeros(series.shape)
    z[mask & ~enters] = np.inf
    asked = scored & enters
    if asked.any():
        z[asked] = _rolling_z(rule, series[enters], ends[asked], series[asked])
    return SpikeFlags(rule.beyond(z), z, scored)


def _rolling_z(
    rule: "SpikeRule", values: np.ndarray, ends: np.ndarray, asked: np.ndarray
) -> np.ndarray:
    """Scores `asked` against `values[end - window : end]`, in O(1) per window.

    Cut into blocks as long as the window, every window is the tail of one block
    plus the head of the next. Sums run within a block only, so they never drift,
    and they are taken of deviations from the value where the head begins. As that
    value is in the window, its distance from the mean is at most sqrt(window)
    standard deviations, which bounds the cancellation whatever the series' offset.
    """
    width = min(rule.window, values.size)
    padding = np.full(-values.size % width, values[-1])
    blocks = np.concatenate([values, padding]).reshape(-1, width)
    pivots = blocks[:, :1]
    starts = np.maximum(ends - width, 0)
    sums = []
    for power in (1, 2):
        heads = np.cumsum((blocks - pivots) ** power, axis=1)
        tails = np.zeros_like(blocks)
        reverse = (blocks[:-1, :0:-1] - pivots[1:]) ** power
        tails[:-1, 1:] = np.cumsum(reverse, axis=1)[:, ::-1]
        sums.append(heads.ravel()[ends - 1] + tails.ravel()[starts])
    first, second = sums
    number = ends - starts
    mean = first / number
    std = np.sqrt(np.maximum(second - first * mean, 0.0) / (number - rule.ddof))
    jump = asked - pivots[-(-starts // width), 0]
    z = np.where(jump == 0, 0.0, np.copysign(np.inf, jump))
    return np.divide(jump - mean, std, out=z, where=second > 0)
