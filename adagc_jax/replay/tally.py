"""What is kept of a replay in a grid: counts per tensor, in state of fixed size."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adagc_jax.replay.engine import Outcome
from adagc_jax.replay.history import History
from adagc_jax.replay.spikes import SpikeMeasure


class Tally(NamedTuple):
    """Counts over a replay, [tensors] each, with a leading axis for the settings.

    The first five are over all updates, the others over those that are scored, which
    are the same for all settings, and so are the spikes.

    Attributes:
      active: Updates with a finite gradient that was neither zero nor dropped, i32.
      clipped: Of these, updates that clipped, i32.
      row: Updates that clipped, in a row, up to the last one, i32.
      longest: The longest such row, i32.
      min_scale: Smallest scale on an active gradient, f32.
      spikes: Norms that were spikes, i32.
      held: Spikes that were emitted within bounds, or dropped, i32.
      leak: Largest emitted spike in units of its level, f32.
      ordinary: Active norms that were no spikes, i32.
      ordinary_clipped: Of these, those that were clipped, i32.
      ordinary_loss: Sum of what was taken off them, ``1 - scale``, f32.
    """

    active: Any
    clipped: Any
    row: Any
    longest: Any
    min_scale: Any
    spikes: Any
    held: Any
    leak: Any
    ordinary: Any
    ordinary_clipped: Any
    ordinary_loss: Any


def activity(norm: Any, scale: Any, dropped: Any) -> tuple[Any, Any]:
    """Which gradients count, and which of them were clipped: the same everywhere.

    A clip rate is the share of the second in the first. A gradient that is zero, not
    finite or dropped is not there for a clipper.
    """
    active = (norm > 0.0) & (norm < np.inf) & ~dropped
    return active, active & (scale < 1.0)


def activity_of(history: History) -> tuple[np.ndarray, np.ndarray]:
    """The same of a history with scales; where a scale is unknown, nothing counts."""
    assert history.scale is not None
    return activity(history.norm, history.scale, ~(history.scale > 0.0))


def no_tally(tensors: int) -> Tally:
    """Counts before the first update."""
    count, number = jnp.zeros(tensors, jnp.int32), jnp.zeros(tensors, jnp.float32)
    whole = dict.fromkeys(Tally._fields, count)
    return Tally(**(whole | {"leak": number, "ordinary_loss": number}))._replace(
        min_scale=number + 1.0
    )


def counted(
    tally: Tally,
    outcome: Outcome,
    norm: jax.Array,
    level: jax.Array,
    scored: jax.Array,
    measure: SpikeMeasure,
) -> Tally:
    """The counts after one more update."""
    scale = jnp.broadcast_to(outcome.scale, norm.shape)
    active, clipped = activity(norm, scale, outcome.dropped)
    # Whatever the rule did: all settings are measured against the same spikes.
    beyond = jnp.isfinite(norm) & (norm > measure.ratio * level)
    is_spike, ordinary = beyond & scored, active & ~beyond & scored
    emitted = jnp.where(is_spike & ~outcome.dropped, scale * norm / level, 0.0)
    row = jnp.where(active, jnp.where(clipped, tally.row + 1, 0), tally.row)

    def add(count: jax.Array, more: jax.Array) -> jax.Array:
        return count + more.astype(jnp.int32)

    return Tally(
        active=add(tally.active, active),
        clipped=add(tally.clipped, clipped),
        row=row,
        longest=jnp.maximum(tally.longest, row),
        min_scale=jnp.minimum(tally.min_scale, jnp.where(active, scale, 1.0)),
        spikes=add(tally.spikes, is_spike),
        held=add(tally.held, is_spike & (emitted <= measure.held)),
        leak=jnp.maximum(tally.leak, emitted),
        ordinary=add(tally.ordinary, ordinary),
        ordinary_clipped=add(tally.ordinary_clipped, ordinary & clipped),
        ordinary_loss=tally.ordinary_loss + jnp.where(ordinary, 1.0 - scale, 0.0),
    )
