"""Medians over seeds, and how far they might be off: bootstrap over seeds."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

RESAMPLES = 4000


def median_with_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median over seeds, and the 95 % interval of it under resampling of seeds."""
    return mean_of_medians([values])


def mean_of_medians(rows: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Mean over scenarios [scenarios, seeds] of medians, and its 95 % interval.

    Seeds are drawn once for all scenarios, which share them.
    """
    table = np.asarray(rows, np.float64)
    draws = np.random.default_rng(0).integers(
        0, table.shape[1], (RESAMPLES, table.shape[1])
    )
    medians = np.median(table[:, draws], axis=-1).mean(axis=0)
    low, high = np.percentile(medians, (2.5, 97.5))
    return float(np.median(table, axis=1).mean()), float(low), float(high)


def paired(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], number: str
) -> list[float]:
    """Differences of a number, seed by seed."""
    pairs = zip(ours[number], theirs[number], strict=True)
    return [a - b for a, b in pairs]
