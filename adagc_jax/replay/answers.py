"""What a grid says: an order of its settings, and a suggestion with its caveat."""

from typing import NamedTuple

import numpy as np

from adagc_jax.replay.variants import Variant
from adagc_jax.replay.whatif import WhatIf
from adagc_jax.replay.words import number_of

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
    held, loss, leak = (
        np.nan_to_num(x) for x in (result.held, result.ordinary_loss, result.leak)
    )
    close = held >= held.max() - _CLOSE
    key = np.where(close, 0.0, -held)
    return [int(i) for i in np.lexsort((leak, loss, key, ~close, ~result.scored))]


def scope(result: WhatIf) -> str:
    """Which updates are scored, and which spikes are left out for that."""
    steps, window = len(result.steps), result.measure.window
    if result.scored_from >= steps:
        why = "every warm-up is longer"
        if window >= steps:
            why = (
                f"the window of a level is {window} updates, and the first has none: "
                "choose a shorter one"
            )
        return (
            f"too short: nothing was scored ({number_of(steps, 'update')} in the log; "
            f"{why})"
        )
    text = f"scored from step {result.steps[result.scored_from]} on"
    if result.left_out:
        text += f"; {number_of(result.left_out, 'spike')} before it left out"
    if late := int((~result.scored).sum()):
        text += f"; {number_of(late, 'setting')} with a longer warm-up not scored"
    return text


def suggest(result: WhatIf) -> Suggestion:
    """The setting that holds the spikes and costs ordinary gradients least.

    Args:
      result: Of `what_if`.

    Returns:
      A `Suggestion`. Without spikes in the log there is none, nor in one that is too
      short to be scored: then nothing in the norms says that one setting is better than
      another.

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
    if not result.scored.any():
        return Suggestion(None, f"The log is {scope(result)}.", CAVEAT)
    if not result.spikes:
        reason = (
            f"No norm is above {measure.ratio:g} times its tensor's level "
            f"({scope(result)}): there are no spikes to hold, and nothing here speaks "
            "for another setting."
        )
        return Suggestion(None, reason, CAVEAT)
    best = ranking(result)[0]
    held = result.held[best]
    tensors = number_of(int((result.tally.spikes[0] > 0).sum()), "tensor")
    reason = (
        f"It holds {100 * held:.1f} % of {number_of(result.spikes, 'spike')} (norms "
        f"above {measure.ratio:g} times their tensor's level, in {tensors}; "
        f"{scope(result)}) to at most {measure.held:g} times that level, the largest "
        f"comes through with {result.leak[best]:.2g} times; and it takes "
        f"{100 * result.ordinary_loss[best]:.2g} % off all other norms, the "
        "least of the settings that hold as much."
    )
    if held < 0.5:
        reason += " That is less than half: widen the grid, or try another rule."
    return Suggestion(result.variants[best], reason, CAVEAT)
