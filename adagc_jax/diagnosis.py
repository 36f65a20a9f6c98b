"""What the numbers of a clipper say about a tensor, in words, and what may help.

Second station of the report: rows of numbers go in, the same rows come out with
diagnoses. Everything is decided from what is in the state, so a report needs no
history; what the state cannot tell is worded as a likelihood.
"""

import dataclasses
from collections.abc import Iterator

KINDS = (
    "poisoned events",
    "throttled",
    "reference far below",
    "held by a global limit",
    "idle",
    "never clipped",
)


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """When something is worth a word; see `clip_report` for each."""

    throttled_after: int = 100
    idle_below: float = 0.1
    far_below: float = 2.0
    often: float = 0.5
    min_updates: int = 20


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """One thing to know about a tensor.

    Attributes:
      kind: One of ``KINDS``.
      meaning: What it says, for every tensor that has it.
      remedy: The options that help.
      detail: The numbers of this tensor.
      severity: Orders the tensors that have it, the worst highest.
    """

    kind: str
    meaning: str
    remedy: str
    detail: str
    severity: float


@dataclasses.dataclass(frozen=True)
class ReportRow:
    """What the clipper did to one tensor, layer or expert, or to the whole tree.

    Attributes:
      name: As in `clip_metrics`; ``(whole tree)`` for rules that work on it.
      is_tree: Whether it stands for the whole tree.
      is_group: Whether a rule clips it by itself. Tensors that are clipped with all
        others have rows too, for their norms and non-finite events.
      norm_before: Norm of the last incoming gradient.
      norm_after: Norm of the last emitted gradient.
      scale: Factor between them.
      clip_rate: Fraction of its active updates that were clipped.
      consecutive_clips: Active updates since the last one that did not clip.
      active: Updates with a finite gradient that was not zero.
      nonfinite: Updates with a NaN or infinite norm.
      updates: Updates of the clipper.
      fields: The rule's own numbers, such as ``gamma``.
      diagnoses: What there is to say, the most serious first.
    """

    name: str
    is_tree: bool
    is_group: bool
    norm_before: float
    norm_after: float
    scale: float
    clip_rate: float
    consecutive_clips: int
    active: int
    nonfinite: int
    updates: int
    fields: dict[str, float]
    diagnoses: tuple[Diagnosis, ...] = ()

    @property
    def gamma(self) -> float | None:
        """Reference norm, if the rule has one and has seen a gradient."""
        return self.fields.get("gamma") or None

    @property
    def norm_over_gamma(self) -> float | None:
        """The last norm relative to the reference."""
        return None if self.gamma is None else self.norm_before / self.gamma


def diagnosed(row: ReportRow, limits: Thresholds) -> ReportRow:
    """The row with its diagnoses."""
    found: list[Diagnosis] = []
    if row.nonfinite:
        found.append(_poisoned(row))
    if row.is_group and row.consecutive_clips >= limits.throttled_after:
        found.append(_clipped_in_a_row(row, limits))
    if row.is_group:
        found.extend(_far_below(row, limits))
    found.extend(_idle(row, limits))
    if row.is_group and row.clip_rate == 0.0 and row.active >= limits.min_updates:
        found.append(_never_clipped(row))
    return dataclasses.replace(row, diagnoses=tuple(found))


def _poisoned(row: ReportRow) -> Diagnosis:
    return Diagnosis(
        "poisoned events",
        "Gradients with NaN or infinite norms came in. No reference has learned from "
        "them, but the optimizer made a step with what nonfinite= says, zeros by "
        "default.",
        "guard(optimizer) leaves such steps out as a whole; look for an overflow in "
        "the layer, its loss scale or learning rate.",
        f"{row.nonfinite:,} of {row.updates:,} updates",
        row.nonfinite,
    )


def _clipped_in_a_row(row: ReportRow, limits: Thresholds) -> Diagnosis:
    detail = f"{row.consecutive_clips:,} in a row"
    if row.norm_over_gamma is not None:
        detail += f", last norm {row.norm_over_gamma:.3g} x gamma"
    since = f"Clipped in each of the last {limits.throttled_after:,} updates or more"
    # Outliers are counted against the group's own reference, and not in warm-up.
    if row.fields.get("outliers") == 0:
        return Diagnosis(
            "held by a global limit",
            f"{since}, and not by its own reference: AdaGC is in its warm-up, or "
            "another rule behind it has a limit.",
            "A larger lambda_abs or fewer warmup_steps, or a larger limit of that "
            "rule.",
            detail,
            row.consecutive_clips,
        )
    if "gamma" in row.fields:
        meaning = f"{since}: the reference gamma lags behind a lasting rise of norms."
        remedy = (
            f"release={limits.throttled_after} lets such a tensor start a new "
            "reference; a smaller beta or a larger lambda_rel lets gamma rise faster."
        )
    elif "mean" in row.fields:
        meaning = f"{since}: the mean lags behind, or max_grad_norm is below it."
        remedy = "A smaller alpha, a larger z_thresh or a larger max_grad_norm."
    else:
        meaning = f"{since}: the limit is below the usual norm, and so it normalises."
        remedy = (
            "A larger limit (max_norm, clipping), or adagc, whose limits follow each "
            "tensor."
        )
    return Diagnosis("throttled", meaning, remedy, detail, row.consecutive_clips)


def _far_below(row: ReportRow, limits: Thresholds) -> Iterator[Diagnosis]:
    if row.gamma is None or row.fields.get("outliers") == 0:
        return
    # The mean over the clipped updates in a row says more than the last norm.
    norm = row.fields.get("level") or row.norm_before
    enough = row.active >= limits.min_updates and row.clip_rate >= limits.often
    if enough and norm >= limits.far_below * row.gamma:
        yield Diagnosis(
            "reference far below",
            f"Most updates were clipped, and gamma is {limits.far_below:g} times or "
            "more below the norms: likely the minimum of the warm-up, far below the "
            "norms since.",
            'warmup_init="ema" starts from an average instead; a larger lambda_abs, as '
            "the warm-up learns from norms that it has clipped; a larger lambda_rel; "
            "groups=stacked(...) if one array holds several layers.",
            f"gamma {row.gamma:.3g}, norms {norm:.3g}, clipped "
            f"{100 * row.clip_rate:.0f} %",
            norm / row.gamma,
        )


def _idle(row: ReportRow, limits: Thresholds) -> Iterator[Diagnosis]:
    met = row.active + row.nonfinite
    if row.updates >= limits.min_updates and met < limits.idle_below * row.updates:
        yield Diagnosis(
            "idle",
            f"A gradient in less than {100 * limits.idle_below:g} % of the updates: "
            "what is known about its norm is from few observations. (Zero gradients "
            "do not move a reference.)",
            "If it is frozen or unused, leave it out with mask= or exclude=; for "
            "stacked experts, groups=stacked(...) gives each a reference of its own.",
            f"{row.active:,} of {row.updates:,} updates",
            -row.active,
        )


def _never_clipped(row: ReportRow) -> Diagnosis:
    if "gamma" in row.fields:
        remedy = "Nothing, unless spikes get through: then a smaller lambda_rel."
    elif "mean" in row.fields:
        remedy = "Nothing, unless spikes get through: then a smaller z_thresh."
    else:
        remedy = (
            "Nothing, unless spikes get through: then a smaller limit (max_norm, "
            "clipping), or adagc, whose limits follow each tensor."
        )
    return Diagnosis(
        "never clipped",
        "No update was above the limit so far.",
        remedy,
        f"{row.active:,} updates",
        row.norm_before,
    )
