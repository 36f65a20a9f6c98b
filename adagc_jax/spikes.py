"""Loss spikes: count them in a recorded series, or flag them while training.

A series of losses (or gradient norms) goes in, z-scores against the values just
before come out; nothing here touches gradients or optimizer state. `SpikeRule`
is the definition, `spike_score` reports on a finished series, and `spike_monitor`
is the same rule as a pure step with a state of fixed size for training loops.
"""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from adagc_jax.checks import check_choice, check_int
from adagc_jax.spike_windows import (
    SpikeFlags as SpikeFlags,
    SpikeMonitorState as SpikeMonitorState,
    flags_jax,
    flags_numpy,
    monitor_step,
)

Direction: TypeAlias = Literal["both", "up"]
Denominator: TypeAlias = Literal["all", "scored"]


class SpikeScore(NamedTuple):
    """A report on one series of `steps` values.

    Attributes:
      score: Spikes in percent of the steps; NaN if no step could be scored.
      indices: int `[spikes]`, the 0-based steps of the spikes, ascending.
      z: float `[steps]`, signed; 0 for a step without a score, inf for NaN and ±inf.
    """

    score: float
    indices: Any
    z: Any


class SpikeMonitor(NamedTuple):
    """A pair of pure functions, see `spike_monitor`."""

    init: Callable[[], SpikeMonitorState]
    update: Callable[..., tuple[jax.Array, jax.Array, SpikeMonitorState]]


@dataclass(frozen=True)
class SpikeRule:
    """What counts as a spike: a value at least `n_sigma` deviations off the mean.

    With m and s the mean and standard deviation of the last `window` values,

        z_t = (x_t - m) / s        spike: |z_t| >= n_sigma   (or z_t, if "up")

    In a constant window z is 0 for the same value again and ±inf for any other.
    A value that is not finite is always a spike with z = inf, and never enters the
    window. A masked-out step is not scored and does not enter the window either.

    Args:
      window: Number of values in the window, at least 2.
      n_sigma: The threshold in standard deviations, positive.
      direction: "both" counts jumps up and down, "up" only those up.
      previous_only: False lets x_t into its own window. |z| is then at most
        (window - 1) / sqrt(window) for ddof 0, so a small window has no spikes.
      min_history: Values that must be in the window before a step is scored;
        None waits until the window is full.
      ddof: 0 for the population deviation, 1 for the unbiased variance.
      denominator: What the score is a percentage of: "all" steps but the masked
        ones, or only the "scored" ones, which had min_history.

    Raises:
      ValueError: If an argument is outside its range.

    Example:
      >>> import numpy as np
      >>> losses = np.where(np.arange(2_000) % 2, 2.0, 2.1)
      >>> losses[1_500] = 9.0
      >>> OLMO_CORE.score(losses).indices
      array([1500])

    Reference:
      AdaGC, https://arxiv.org/abs/2502.11034; OLMo 2, https://arxiv.org/abs/2501.00656
    """

    window: int = 1000
    n_sigma: float = 10.0
    _: KW_ONLY
    direction: Direction = "both"
    previous_only: bool = True
    min_history: int | None = None
    ddof: int = 0
    denominator: Denominator = "all"

    def __post_init__(self):
        """Refuses what no series could be scored with."""
        # Plain ints: those of NumPy have a dtype, which arithmetic would promote to.
        self._set("window", check_int("window", self.window, 2, 2**31 - 1))
        self._set("ddof", check_int("ddof", self.ddof, 0, self.window - 1))
        if self.min_history is not None:
            low, high = self.ddof + 1, self.window
            history = check_int("min_history", self.min_history, low, high)
            self._set("min_history", history)
        number = isinstance(self.n_sigma, Real) and not isinstance(self.n_sigma, bool)
        if not (number and 0 < self.n_sigma < math.inf):
            raise ValueError(f"n_sigma must be in (0, inf), got {self.n_sigma!r}")
        self._set("n_sigma", float(self.n_sigma))
        check_choice("direction", self.direction, ("both", "up"))
        check_choice("denominator", self.denominator, ("all", "scored"))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def score(self, series: Any, mask: Any = None) -> SpikeScore:
        """Reports the spikes of a series; `spike_score` says more."""
        is_spike, z, scored = self.flags(series, mask)
        if isinstance(is_spike, jax.core.Tracer):
            raise TypeError(
                "spike_score needs concrete values, since the number of indices "
                "depends on them; under jit use SpikeRule(...).flags(series)"
            )
        spikes, counted = int(is_spike.sum()), int(scored.sum())
        steps = is_spike.size if mask is None else int(np.sum(mask))
        if self.denominator == "scored":
            steps = counted
        score = 100.0 * spikes / steps if counted else math.nan
        return SpikeScore(score, is_spike.nonzero()[0], z)

    def flags(self, series: Any, mask: Any = None) -> SpikeFlags:
        """Flags every step: jit-safe for a JAX array, float64 for anything else."""
        xp = jnp if isinstance(series, jax.Array) else np
        series = xp.asarray(series)
        if series.ndim != 1:
            raise ValueError(f"series must have one axis, got shape {series.shape}")
        mask = xp.ones(series.shape, bool) if mask is None else xp.asarray(mask)
        if mask.shape != series.shape or mask.dtype != bool:
            raise ValueError(
                f"mask must be bool of shape {series.shape}, "
                f"got {mask.dtype} of shape {mask.shape}"
            )
        flags = flags_numpy if xp is np else flags_jax
        return flags(self, series, mask)

    def monitor(self, dtype: Any = jnp.float32) -> SpikeMonitor:
        """Returns this rule as pure functions; `spike_monitor` says more."""
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"dtype must be a floating dtype, got {dtype!r}.")

        def init():
            values = jnp.zeros(self.window, dtype)
            return SpikeMonitorState(values, jnp.zeros((), jnp.int32))

        def update(value, state, include=True):
            flags, state = monitor_step(self, value, include, state)
            return flags.z, flags.is_spike, state

        return SpikeMonitor(init, update)

    @property
    def history(self) -> int:
        """Values that must be in the window before a step is scored."""
        return self.window if self.min_history is None else self.min_history

    def beyond(self, z: Any) -> Any:
        """Whether a score counts as a spike."""
        return (abs(z) if self.direction == "both" else z) >= float(self.n_sigma)


# The published definitions: two papers, and the code behind the second.
ADAGC = SpikeRule()
OLMO2 = SpikeRule(1000, 7.0)
OLMO_CORE = SpikeRule(128, 6.0, direction="up")


def spike_score(
    series: Any,
    window: int = 1000,
    n_sigma: float = 10.0,
    *,
    direction: Direction = "both",
    previous_only: bool = True,
    min_history: int | None = None,
    ddof: int = 0,
    denominator: Denominator = "all",
    mask: Any = None,
) -> SpikeScore:
    """Scores a series of losses: the percentage of steps that are spikes.

        score = 100 * #{t : |x_t - m_t| >= n_sigma * s_t} / steps

    with m_t, s_t over the `window` values before t. The defaults are AdaGC's. The
    presets `ADAGC`, `OLMO2` and `OLMO_CORE` are rules: `OLMO2.score(series, mask)`.
    One large spike inflates s_t for `window` steps and hides the next, so look at
    the largest z and at the validation loss beside the score.

    Args:
      series: `[steps]` real numbers. All but a JAX array goes through NumPy in
        float64, in time proportional to steps. A JAX array stays in JAX and its
        precision (at least float32), in time proportional to steps * window.
      window: As in `SpikeRule`, and so are all the others but `mask`.
      n_sigma: In standard deviations.
      direction: "both" or "up".
      previous_only: Whether a value stays out of its own window.
      min_history: None waits until the window is full.
      ddof: 0 or 1.
      denominator: "all" or "scored".
      mask: bool `[steps]`; False leaves a step out of the scoring and the window.

    Returns:
      `SpikeScore`: the score in percent, the steps of the spikes, and every z.

    Raises:
      ValueError: If an argument is out of range, or a shape does not fit.
      TypeError: Under `jit`; use `SpikeRule(...).flags(series)` there.

    Example:
      >>> import numpy as np
      >>> losses = np.where(np.arange(9_000) % 2, 2.0, 2.1)
      >>> losses[[3_000, 5_000, 7_000]] = 9.0
      >>> score, indices, z = spike_score(losses)
      >>> print(f"{score:.4f} %", indices)
      0.0333 % [3000 5000 7000]

    Reference:
      AdaGC, https://arxiv.org/abs/2502.11034
    """
    rule = SpikeRule(
        window,
        n_sigma,
        direction=direction,
        previous_only=previous_only,
        min_history=min_history,
        ddof=ddof,
        denominator=denominator,
    )
    return rule.score(series, mask)


def spike_monitor(
    window: int = 1000, n_sigma: float = 10.0, *, dtype: Any = jnp.float32, **rule: Any
) -> SpikeMonitor:
    """Flags spikes one value at a time, inside a jitted training step or `scan`.

    The z and flags are those of `spike_score` on the whole series, up to rounding:
    z = (x_t - m_t) / s_t. A step costs a few passes over the window. For a preset:
    `OLMO_CORE.monitor()`.

    Args:
      window: As in `SpikeRule`, and so is `n_sigma`.
      n_sigma: In standard deviations.
      dtype: Of the stored values and of z.
      **rule: The other arguments of `SpikeRule`.

    Returns:
      `init() -> state` and `update(value, state, include=True) -> (z, is_spike,
      state)`, with scalar `value` and bool `include` (False: leave this step out).
      For many series at once, such as one norm per layer, use `jax.vmap`.

    Raises:
      ValueError: If an argument is out of range.

    Example:
      >>> init, update = spike_monitor(window=4, n_sigma=6)
      >>> state = init()
      >>> for loss in (2.0, 2.1, 2.0, 2.1, 9.0):
      ...     z, is_spike, state = update(loss, state)
      >>> print(f"{z:.0f}", is_spike)
      139 True

    Reference:
      OLMo 2, https://arxiv.org/abs/2501.00656
    """
    return SpikeRule(window, n_sigma, **rule).monitor(dtype)
