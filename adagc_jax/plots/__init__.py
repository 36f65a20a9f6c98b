"""Pictures of a run and of a replay; extra ``plots`` (matplotlib).

Every function takes what `adagc_jax.replay` reads or makes, draws on a figure of its
own and returns it: ``figure.savefig(path)``. Nothing is shown, and no global state of
matplotlib is touched, so they work in a training job without a display.
"""

from adagc_jax.plots.episodes import plot_episode as plot_episode
from adagc_jax.plots.grids import (
    plot_clip_rates as plot_clip_rates,
    plot_what_if as plot_what_if,
)
from adagc_jax.plots.losses import plot_loss as plot_loss
from adagc_jax.plots.norms import plot_gamma as plot_gamma
from adagc_jax.plots.scales import plot_scales as plot_scales
