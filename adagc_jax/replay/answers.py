"""What a grid says: an order of its settings, and a suggestion with its caveat."""

from typing import NamedTuple

import numpy as np

from adagc_jax.replay.variants import Variant
from adagc_jax.replay.whatif import WhatIf

# Settings that hold all but this share of what the best one holds count as equal.
_CLOSE = 0.01

CAVEAT = (
    "Norms are taken as given: another setting would have changed the run from its "
    "first clipped step on, and with it every norm after that. The start of each spike "
    "says most, what follows a spike that the run let through says least. Try the "
    "suggestion in a short run before a long one."
)


class Suggestion(NamedTuple):
    """A setting, or None where the norms give no ground for one; why; and but."""

    variant: Variant | None
    reason: str
    caveat: str


def ranking(result: WhatIf) -> list[int]:
    """Settings from best to worst.

    Those that hold about as many spikes as the best one come first, the least taken off
    ordinary norms in front; then the others, by what they hold.
    """
    held = np.nan_to_num(result.held)
    close = held >= held.max() - _CLOSE
    loss, leak = result.ordinary_loss, result.tally.leak.max(axis=1)
    key = np.where(close, 0.0, -held)
    return [int(i) for i in np.lexsort((leak, np.nan_to_num(loss), key, ~close))]


def suggest(result: WhatIf) -> Suggestion:
    """The setting that holds the spikes and costs ordinary gradients least.

    Args:
      result: Of `what_if`.

    Returns:
      A `Suggestion`. Without spikes in the log there is none: then nothing in the norms
      says that one setting is better than another.

    Example:
      >>> import numpy as np
      >>> from adagc_jax.replay import History, make_grid, make_variant, what_if
      >>> steps, norm = np.arange(300), np.ones((300, 1), np.float32)
      >>> norm[200] = 8.0
      >>> history = History(("w",), steps, steps, norm, np.zeros(300, np.float32))
      >>> grid = make_grid(make_variant("tensor_gc"), {"max_norm": (0.5, 1.0, 8.0)})
      >>> str(suggest(what_if(history, grid)).variant)
      'tensor_gc(max_norm=1.0)'
    """
    measure = result.measure
    spikes = int(result.tally.spikes[0].sum())
    if not spikes:
        reason = (
            f"No norm after step {result.scored_from} of the log is above "
            f"{measure.ratio:g} times its tensor's level: there are no spikes to hold, "
            "and nothing here speaks for another setting."
        )
        return Suggestion(None, reason, CAVEAT)
    best = ranking(result)[0]
    held = result.held[best]
    tensors = int((result.tally.spikes[0] > 0).sum())
    leak = float(result.tally.leak[best].max())
    reason = (
        f"It holds {100 * held:.1f} % of the {spikes} spikes (norms above "
        f"{measure.ratio:g} times their tensor's level, in {tensors} tensors) to at "
        f"most {measure.held:g} times that level, the largest comes through with "
        f"{leak:.2g} times; and it takes {100 * result.ordinary_loss[best]:.2g} % off "
        "all other norms, the least of the settings that hold as much."
    )
    if held < 0.5:
        reason += " That is less than half: widen the grid, or try another rule."
    return Suggestion(result.variants[best], reason, CAVEAT)
