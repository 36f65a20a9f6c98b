"""What a finished run says: jumps after bursts, spikes, clip rate, and one reading."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from _config import Config
from _data import Burst

from adagc_jax import spike_score

Row = dict[str, Any]

_BEFORE, _AFTER = 10, 5


@dataclasses.dataclass
class Run:
    """One clipper's training: a row of numbers per step, and how it ended.

    `rows[i]` is step i, as it was made last; `log` has the steps that a rollback undid
    as well, in the order in which they were made.
    """

    name: str
    rows: list[Row] = dataclasses.field(default_factory=list)
    log: list[Row] = dataclasses.field(default_factory=list)
    rollbacks: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    validation_loss: float | None = None
    compile_seconds: float = 0.0
    ms_per_step: float | None = None
    batches_sha256: str = ""
    stopped: str = ""

    def add(
        self,
        where: Mapping[str, Any],
        numbers: Mapping[str, Any],
        nonfinite: Mapping[str, Any],
    ) -> None:
        """Appends one step's row, `where` first, then the numbers.

        The first loss that is no number ends the run; with a guard, its giving up does.
        """
        if self.stopped:
            return
        bad_paths = [path for path, bad in nonfinite.items() if bad]
        row = {**where, "loss": None}
        row |= {key: value.item() for key, value in numbers.items()}
        row["nonfinite_gradients"] = bad_paths
        self.rows.append(row)
        self.log.append(row)
        if row.get("guard/gave_up", not math.isfinite(row["loss"])):
            self.stopped = self._why_stopped()

    def undo(self, step: int, event: dict[str, Any]) -> None:
        """Takes back all steps from `step` on, for the reason in `event`."""
        for row in self.rows[step:]:
            row["undone"] = True
        del self.rows[step:]
        self.rollbacks.append(event)
        self.stopped = ""

    def _why_stopped(self) -> str:
        last = self.rows[-1]
        first = next((r for r in self.rows if r["nonfinite_gradients"]), last)
        gave_up = ", the guard gave up" if last.get("guard/gave_up") else ""
        return (
            f"stopped, the loss of step {last['step']} is {last['loss']}{gave_up}; the "
            f"first non-finite gradients came in step {first['step']}, in "
            f"{', '.join(first['nonfinite_gradients'])}"
        )

    def series(self, key: str) -> np.ndarray:
        """The value of `key` in each step, NaN where there is none."""
        values = (row.get(key) for row in self.rows)
        return np.array([np.nan if v is None else v for v in values], float)

    @property
    def batches(self) -> np.ndarray:
        """The index of each step's batch: the step, unless some were skipped."""
        return np.array([row.get("batch_index", row["step"]) for row in self.rows], int)

    def by_batch(self, values: np.ndarray) -> np.ndarray:
        """[..., steps] spread out to [..., batches], NaN where one was skipped."""
        spread = np.full((*values.shape[:-1], self.batches[-1] + 1), np.nan)
        spread[..., self.batches] = values
        return spread

    @property
    def clean(self) -> np.ndarray:
        """Which steps saw an uncorrupted batch."""
        return np.array([row["batch"] == "clean" for row in self.rows], bool)

    @property
    def scales(self) -> np.ndarray:
        """The factor on each tensor's gradient, [tensors, steps]."""
        return np.array([self.series(f"clip/{name}/scale") for name in self.tensors])

    @property
    def is_local(self) -> bool:
        """Whether some step scaled one tensor otherwise than another."""
        scales = self.scales
        return scales.size > 0 and bool((scales != scales[0]).any())

    @property
    def tensors(self) -> list[str]:
        """Paths of the tensors that have a scale of their own in the log."""
        suffix = "/scale"
        keys = self.rows[0] if self.rows else ()
        return [
            key.removeprefix("clip/").removesuffix(suffix)
            for key in keys
            if key.startswith("clip/") and key.endswith(suffix)
        ]


def jump(losses: np.ndarray, end_of_before: int, start_of_after: int) -> float:
    """Largest of the next five losses minus the mean of the ten before."""
    before = losses[end_of_before - _BEFORE : end_of_before]
    after = losses[start_of_after : start_of_after + _AFTER]
    return float(after.max() - before.mean())


def jumps(run: Run, bursts: Sequence[Burst], length: int) -> dict[str, float]:
    """The jump in clean loss after each burst that the run got past.

    Of a burst that a rollback skipped, it is the jump from before the skipped batches.
    """
    losses, found = run.series("loss"), {}
    for burst in bursts:
        # The steps of its first batch and of the first one after it.
        start, end = np.searchsorted(run.batches, [burst.step, burst.step + length])
        if start >= _BEFORE and end + _AFTER <= len(losses):
            found[str(burst)] = jump(losses, start, end)
    return found


def jitter(run: Run, skip: int) -> float | None:
    """The jump that undisturbed training stays below in 19 of 20 places.

    Args:
      run: The training run.
      skip: First steps to leave out, where the loss still falls fast.
    """
    losses, clean = run.series("loss"), run.clean
    places = range(max(skip, 2 * _BEFORE), len(losses) - _AFTER)
    undisturbed = [t for t in places if clean[t - 2 * _BEFORE : t + _AFTER].all()]
    if not undisturbed:
        return None
    return float(np.percentile([jump(losses, t, t) for t in undisturbed], 95))


def summarise(run: Run, config: Config) -> dict[str, Any]:
    """The numbers of one table row."""
    score, _, z = spike_score(
        run.series("loss"),
        window=config.window,
        n_sigma=config.n_sigma,
        direction="up",
        mask=run.clean,
    )
    return {
        "validation_loss": run.validation_loss,
        "jumps": jumps(run, config.bursts, config.burst_length),
        "jitter": jitter(run, skip=len(run.rows) // 4),
        "max_z": None if math.isnan(score) else float(np.max(z)),
        "spike_score_percent": score,
        "clip_rate": float(np.nanmean(run.series("clip/fraction_clipped"))),
        "ms_per_step": run.ms_per_step,
        "compile_seconds": run.compile_seconds,
        "steps": len(run.rows),
        "skipped": run.rows[-1].get("guard/skipped"),
        "rollbacks": len(run.rollbacks) if config.rollback else None,
        "rollback_events": run.rollbacks,
        "batches_sha256": run.batches_sha256,
        "stopped": run.stopped,
    }


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _validation_reading(results: Mapping[str, Any]) -> str:
    losses = {n: r["validation_loss"] for n, r in results.items()}
    ranked = sorted((v, n) for n, v in losses.items() if _finite(v))
    if len(ranked) < 2:
        return "Fewer than two runs finished, so there is no comparison."
    (best, name), (second, runner_up) = ranked[:2]
    return (
        f"{name} has the lowest validation loss, {second - best:.3f} below {runner_up}."
    )


def _jump_reading(results: Mapping[str, Any]) -> str:
    worst = {n: max(r["jumps"].values()) for n, r in results.items() if r["jumps"]}
    if len(worst) < 2:
        return ""
    calm, hit = min(worst, key=worst.__getitem__), max(worst, key=worst.__getitem__)
    usual = [r["jitter"] for r in results.values() if _finite(r["jitter"])]
    within = ""
    if usual:
        within = f"; 95 % of undisturbed places stay below {max(usual):.2f}"
    return (
        f"The worst jump after a burst is {worst[hit]:.2f} with {hit} and "
        f"{worst[calm]:.2f} with {calm}{within}."
    )


def reading(results: Mapping[str, Any]) -> str:
    """What the table supports, in words."""
    busiest = max(results, key=lambda name: results[name]["clip_rate"])
    rate = 100 * results[busiest]["clip_rate"]
    sentences = (
        _validation_reading(results),
        _jump_reading(results),
        f"{busiest} clips most, {rate:.0f} % of all tensors and steps.",
        "One seed: try others before trusting small gaps.",
    )
    return " ".join(filter(None, sentences))
