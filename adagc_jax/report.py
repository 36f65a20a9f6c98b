"""The report for people: which tensors are clipped most, why, and what helps.

optimizer state -> readings -> rows -> diagnoses -> ClipReport -> text, rich, HTML
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from adagc_jax import report_views
from adagc_jax.checks import check_choice, check_count, check_hyper
from adagc_jax.diagnosis import KINDS, Diagnosis, ReportRow, Thresholds, diagnosed
from adagc_jax.metrics import totals
from adagc_jax.readings import Reading, Section, read

RANKINGS = ("clip_rate", "consecutive_clips", "norm_over_gamma", "norm_before")
_COLUMNS = (
    "norm_before",
    "norm_after",
    "scale",
    "clip_rate",
    "consecutive_clips",
    "active",
    "nonfinite",
)


@dataclasses.dataclass(frozen=True)
class ClipReport:
    """What `clip_report` returns: prints as text, shows itself in notebooks.

    Attributes:
      rows: One `ReportRow` for each tensor, layer and expert, in the order of
        `group_names`; before those of a clipper that works on the whole tree, one for
        the tree.
      totals: Of each clipper that is reported by itself, its prefix (empty if there is
        only one report) and the totals of `clip_metrics`.
      top: How many tensors each list names.

    Example:
      >>> import adagc_jax, jax.numpy as jnp
      >>> clip = adagc_jax.adagc()
      >>> report = adagc_jax.clip_report(clip.init({"w": jnp.ones(2)}))
      >>> isinstance(report, adagc_jax.ClipReport)
      True
    """

    rows: tuple[ReportRow, ...]
    totals: tuple[tuple[str, dict[str, float]], ...]
    top: int

    def worst(self, by: str = "clip_rate", count: int | None = None) -> list[ReportRow]:
        """The rows with the highest values, the worst first; none that are zero.

        Args:
          by: ``"clip_rate"``, ``"consecutive_clips"``, ``"norm_over_gamma"`` of what a
            rule clips by itself, or ``"norm_before"`` of tensors.
          count: How many at most; default ``top``.

        Returns:
          Rows. Of equals, those with the larger norm come first.
        """
        check_choice("by", by, RANKINGS)
        by_norm = by == "norm_before"
        rows = [r for r in self.rows if (not r.is_tree if by_norm else r.is_group)]
        # What is not a number is worse than any.
        bad = [(_badness(getattr(row, by)), _badness(row.norm_before)) for row in rows]
        order = sorted(range(len(rows)), key=bad.__getitem__, reverse=True)
        return [rows[i] for i in order if bad[i][0] > 0.0][: count or self.top]

    @property
    def findings(self) -> list[tuple[Diagnosis, list[ReportRow]]]:
        """Each diagnosis with its rows, both from the most serious on."""
        found: dict[tuple[str, str, str], tuple[Diagnosis, list[ReportRow]]] = {}
        for row in self.rows:
            for said in row.diagnoses:
                key = (said.kind, said.meaning, said.remedy)
                found.setdefault(key, (said, []))[1].append(row)
        for said, rows in found.values():
            rows.sort(
                key=lambda row, kind=said.kind: _severity(row, kind), reverse=True
            )
        return sorted(found.values(), key=lambda entry: KINDS.index(entry[0].kind))

    def show(self) -> None:
        """Prints it, with rich where it is installed and there is a terminal."""
        report_views.show(self)

    def __str__(self) -> str:
        return report_views.as_text(self)

    def __rich__(self) -> Any:
        return report_views.as_rich(self)

    def _repr_html_(self) -> str:
        return report_views.as_html(self)


def clip_report(
    opt_state: Any,
    params: Any = None,
    *,
    top: int = 5,
    throttled_after: int = 100,
    idle_below: float = 0.1,
    far_below: float = 2.0,
    often: float = 0.5,
    min_updates: int = 20,
) -> ClipReport:
    r"""What the clipper did so far, for people: totals, worst tensors, diagnoses.

    A tensor is *throttled* if :math:`k \ge K` updates in a row were clipped; has a
    *reference far below* its norms if :math:`n \ge c\,\gamma` and at least the fraction
    :math:`q` of its updates was clipped; is *idle* if it was active in less than the
    fraction :math:`f` of the updates; has met *poisoned events* if a norm was not
    finite; and else was *never clipped*, or there is nothing to say. Each diagnosis
    names the options that help.

    Args:
      opt_state: Any optimizer state with a clipper in it, at any depth, of concrete
        arrays; see `clip_metrics`.
      params: The parameters, as in `clip_metrics`.
      top: How many tensors each list names, at least 1. ``report.rows`` has all.
      throttled_after: :math:`K`, in updates, at least 1.
      idle_below: :math:`f`, in [0, 1].
      far_below: :math:`c`, how many times :math:`\gamma` is below the norm, at least 1.
      often: :math:`q`, in [0, 1].
      min_updates: Updates before a tensor is called idle, never clipped or far above
        its reference, at least 1.

    Returns:
      A `ClipReport`: ``print`` gives a plain table, ``report.show()`` one with rich,
      a notebook HTML; ``report.rows``, ``report.worst(by)`` and ``report.findings`` are
      the data.

    Raises:
      ValueError: for a bad argument, traced arrays, or a state without a clipper or
        without names, as in `clip_metrics`.

    Example:
      >>> import adagc_jax, jax.numpy as jnp
      >>> clip = adagc_jax.tensor_gc(1.0)
      >>> grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([0.5])}
      >>> _, state = clip.update(grads, clip.init(grads))
      >>> report = adagc_jax.clip_report(state)
      >>> [(row.name, row.clip_rate) for row in report.worst("clip_rate")]
      [('a', 1.0)]
      >>> print(str(report).splitlines()[0])
      Clipping report: 2 tensors, 1 update

    Reference:
      The diagnostics of AdaGC, https://arxiv.org/abs/2502.11034.
    """
    check_count("top", top, low=1)
    limits = Thresholds(
        throttled_after=check_count("throttled_after", throttled_after, low=1),
        idle_below=check_hyper("idle_below", idle_below, high=1.0),
        far_below=check_hyper("far_below", far_below, low=1.0),
        often=check_hyper("often", often, high=1.0),
        min_updates=check_count("min_updates", min_updates, low=1),
    )
    sections = read(opt_state, params)
    rows = [row for section in sections for row in _rows(section)]
    return ClipReport(
        rows=tuple(diagnosed(row, limits) for row in rows),
        totals=tuple(
            (section.prefix, {k: _number(v) for k, v in totals(section).items()})
            for section in sections
        ),
        top=int(top),
    )


def _rows(section: Section) -> Iterator[ReportRow]:
    """The rows of one section, those of the whole tree before its tensors."""
    trees = [number for number, r in enumerate(section.readings) if _has_tree_row(r)]
    for number, reading in enumerate(section.readings):
        if number in trees:
            place = f" {trees.index(number)}" if len(trees) > 1 else ""
            yield _tree_row(f"{section.prefix}(whole tree{place})", reading)
        yield from _tensor_rows(section.prefix, reading)


def _has_tree_row(reading: Reading) -> bool:
    return _is_whole(reading) and bool(reading.names)


def _is_whole(reading: Reading) -> bool:
    return all(whole for whole, _ in reading.rules)


def _tensor_rows(prefix: str, reading: Reading) -> Iterator[ReportRow]:
    columns = {
        name: [_number(value) for value in reading.table.column(name)]
        for name in reading.table.pieces
    }
    own = [field for whole, fields in reading.rules for field in fields if not whole]
    for place, name in enumerate(reading.names):
        values = {column: numbers[place] for column, numbers in columns.items()}
        yield ReportRow(
            name=prefix + name,
            is_tree=False,
            is_group=not _is_whole(reading),
            updates=_number(reading.step),
            fields={field: values[field] for field in own if field in values},
            **{column: values[column] for column in _COLUMNS},
        )


def _tree_row(name: str, reading: Reading) -> ReportRow:
    numbers = totals(Section("", (reading,)))
    most = {k: max(reading.table.column(k)) for k in ("consecutive_clips", "active")}
    values = {
        **{k: numbers[k] for k in ("norm_before", "norm_after", "clip_rate")},
        **{k: _number(v) for k, v in most.items()},
        "scale": numbers["min_scale"],
        "nonfinite": numbers["nonfinite"],
    }
    return ReportRow(
        name=name,
        is_tree=True,
        is_group=True,
        updates=_number(reading.step),
        fields={k: _number(v) for k, v in reading.whole.items()},
        **{k: _number(v) for k, v in values.items()},
    )


def _number(value: Any) -> Any:
    """A Python number: rows are data for people, not arrays."""
    try:
        return value.item() if hasattr(value, "item") else value
    except TypeError as error:  # of tracers
        raise ValueError(
            "opt_state is traced: call clip_report outside jit, on concrete arrays, or "
            "use clip_metrics inside."
        ) from error


def _severity(row: ReportRow, kind: str) -> tuple[float, float]:
    severity = next(said.severity for said in row.diagnoses if said.kind == kind)
    return severity, _badness(row.norm_before)


def _badness(value: float | None) -> float:
    if value is None:
        return 0.0
    return float("inf") if value != value else float(value)
