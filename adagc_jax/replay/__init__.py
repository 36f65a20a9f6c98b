"""Replay: what would another clipper, or another setting, have done?

A log of gradient norms goes in (`read_history`), a rule of the library runs on it
exactly as its transform would (`replay`), or a grid of settings does (`what_if`), and
the answers come out as arrays, text and pictures. ``adagc-replay`` is the same from a
shell.
"""

from adagc_jax.replay.answers import Suggestion as Suggestion, suggest as suggest
from adagc_jax.replay.engine import Replayed as Replayed, replay as replay
from adagc_jax.replay.history import (
    History as History,
    load_history as load_history,
    save_history as save_history,
)
from adagc_jax.replay.readers import read_history as read_history
from adagc_jax.replay.spikes import (
    Episode as Episode,
    SpikeMeasure as SpikeMeasure,
    find_episodes as find_episodes,
)
from adagc_jax.replay.thresholds import thresholds as thresholds
from adagc_jax.replay.variants import (
    Variant as Variant,
    make_grid as make_grid,
    make_variant as make_variant,
)
from adagc_jax.replay.whatif import WhatIf as WhatIf, what_if as what_if
