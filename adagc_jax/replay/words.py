"""Words that tables, sentences and pictures share."""

from collections.abc import Sequence

import numpy as np


def number_of(count: int, noun: str) -> str:
    """``1 spike``, ``2 spikes``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def share(value: float) -> str:
    """A share in percent."""
    return "n/a" if np.isnan(value) else f"{100 * value:.2f} %"


def first_of(names: Sequence[str]) -> str:
    """The first of some tensors, and how many there are besides it."""
    more = len(names) - 1
    return names[0] + (f" and {more} more" if more else "")
