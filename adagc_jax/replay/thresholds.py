"""Thresholds over time: the norm from which a rule would have clipped.

Rules answer with scales and keep their limits to themselves. So the limit is found as
one would from outside: by asking for the scale of norm after norm, in the state in
which the rule was before the update.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from adagc_jax.replay.engine import Replayed
from adagc_jax.rules import Observation

_LOW, _HIGH = 1e-18, 1e18
# Halving the logarithm of this range so often comes down to float32's resolution.
_HALVINGS = 36


def thresholds(replayed: Replayed, names: Sequence[str] | None = None) -> np.ndarray:
    """The largest norm that each group could have had without being clipped.

    Args:
      replayed: Of `replay`.
      names: Groups to look at; default: all.

    Returns:
      f32[time, names]: NaN where the group's own norm decided nothing, as in a warm-up
      that clips the whole tree, and before its first gradient.

    Raises:
      ValueError: for an unknown name.

    Example:
      >>> import numpy as np
      >>> from adagc_jax.replay import History, make_variant, replay
      >>> steps, norm = np.arange(2), np.ones((2, 1), np.float32)
      >>> history = History(("w",), steps, steps, norm, np.zeros(2, np.float32))
      >>> limits = thresholds(replay(history, make_variant("tensor_gc", max_norm=0.5)))
      >>> limits.round(4).tolist()
      [[0.5], [0.5]]
    """
    history = replayed.history
    columns = [history.index(name) for name in (names or history.names)]
    rule = replayed.variant.rule()
    states = jax.tree.map(lambda field: field[:, columns], replayed.states)
    total = history.whole().norm[:, 0]

    def clips(norm, seen, state, update, total):
        total = total if rule.needs_total else None
        return rule.scale(Observation(norm, seen, update, total), state) < 1.0

    def search(seen, state, update, total):
        def halve(_, bounds):
            low, high = bounds
            middle = jnp.sqrt(low) * jnp.sqrt(high)
            over = clips(middle, seen, state, update, total)
            return jnp.where(over, low, middle), jnp.where(over, middle, high)

        low, high = (
            jnp.full(seen.shape, bound, jnp.float32) for bound in (_LOW, _HIGH)
        )
        found = jax.lax.fori_loop(0, _HALVINGS, halve, (low, high))[0]
        decides = clips(high, seen, state, update, total) & ~clips(
            low, seen, state, update, total
        )
        return jnp.where(decides, found, jnp.nan)

    updates = np.minimum(history.updates, np.iinfo(np.int32).max).astype(np.int32)
    found = jax.jit(jax.vmap(search))(
        replayed.seen[:, columns], states, updates, np.nan_to_num(total, posinf=0.0)
    )
    return np.asarray(found)
