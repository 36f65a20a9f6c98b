"""What was aimed at on CPU, what was measured, and whether that meets it."""

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import _step_tables
from _step_tables import Table, name_of

OPTAX, ADAGC, STEADY = "optax.clip_by_global_norm", "adagc", "adagc (steady)"
OURS = (ADAGC, STEADY, "robust_gc", "global_gc", "tensor_gc", "agc", "zclip")
EXPONENT = 1.1
Rows = dict[str, dict[str, Any]]


class Found(NamedTuple):
    """A number that ought to be at most (or at least) a limit.

    ``low`` and ``high`` are the quartiles of what was measured, where there are any.
    """

    value: float
    low: float
    high: float


class Target(NamedTuple):
    """One aim: what is measured, and the limit that it must keep."""

    name: str
    needs: tuple[str, ...]
    find: Callable[[Rows], Found]
    limit: float
    at_least: bool = False


def ratio(name: str) -> Callable[[Rows], Found]:
    """Time divided by that of AdamW alone."""
    return lambda rows: Found(rows[name]["ratio"], *_quartiles(rows[name]))


def less_overhead(rows: Rows) -> Found:
    """How many times more optax's clip adds to AdamW than AdaGC does."""
    theirs = rows[OPTAX]["ratio"] - 1
    values = (rows[ADAGC]["ratio"], *reversed(_quartiles(rows[ADAGC])))
    return Found(*(theirs / max(value - 1, 1e-3) for value in values))


def beside(name: str, other: str) -> Callable[[Rows], Found]:
    """Time divided by that of another method."""

    def find(rows: Rows) -> Found:
        values = (rows[name]["ratio"], *_quartiles(rows[name]))
        return Found(*(value / rows[other]["ratio"] for value in values))

    return find


def compiling(name: str) -> Callable[[Rows], Found]:
    """Compile time divided by that of optax's clip."""

    def find(rows: Rows) -> Found:
        value = rows[name]["compile_s"] / rows[OPTAX]["compile_s"]
        return Found(value, value, value)

    return find


TARGETS = (
    Target("adagc / AdamW alone", (ADAGC,), ratio(ADAGC), 1.16),
    Target("adagc (steady) / AdamW alone", (STEADY,), ratio(STEADY), 1.16),
    Target(
        "overhead of optax's clip / that of adagc",
        (ADAGC, OPTAX),
        less_overhead,
        2.5,
        at_least=True,
    ),
    Target("global_gc / adagc", ("global_gc", ADAGC), beside("global_gc", ADAGC), 1.0),
    Target("agc / AdamW alone", ("agc",), ratio("agc"), 1.3),
)
COMPILING = tuple(
    Target(f"compile time, {name} / optax's clip", (name, OPTAX), compiling(name), 1.5)
    for name in OURS
)
# Where nearly all the time goes into launching, ratios of time mean little.
TINY = "2000 vectors"


def verdict(target: Target, found: Found) -> str:
    """Met, not met, or not told apart by what was measured."""
    sign = -1 if target.at_least else 1
    if sign * found.value <= sign * target.limit:
        return "met"
    between = found.low <= target.limit <= found.high
    return "within the spread" if between else "**not met**"


def step_rows(tables: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Target by target over all trees with float32 gradients."""
    chosen = [t for t in tables if t["gradients"] == "float32" and "rows" in t]
    for target, t in itertools.product((*TARGETS, *COMPILING), chosen):
        if t["model"] == TINY and target in TARGETS:
            continue
        if any(name not in t["rows"] for name in target.needs):
            continue
        found = target.find(t["rows"])
        aim = f"{'≥' if target.at_least else '≤'} {target.limit:.2f}"
        yield [
            target.name,
            name_of(t),
            aim,
            f"{found.value:.2f}",
            verdict(target, found),
        ]


def linear_rows(report: dict[str, Any]) -> Iterator[list[str]]:
    """The exponents of every method of ours."""
    kinds = {"parameters": "time over parameters", "leaves": "time over tensors"}
    names = [name for name in report["methods"] if name in OURS]
    for kind, name in itertools.product(kinds, names):
        exponent = report["methods"][name][kind]["exponent"]
        met = "met" if exponent <= EXPONENT else "**not met**"
        aim = f"exponent ≤ {EXPONENT}"
        yield [f"{name} is linear", kinds[kind], aim, f"{exponent:.2f}", met]


def table() -> Table:
    """All targets with what was measured."""
    rows = list(step_rows(_step_tables.tables()))
    if _step_tables.LINEARITY.exists():
        rows += linear_rows(json.loads(_step_tables.LINEARITY.read_text()))
    missed = sum("not met" in row[-1] for row in rows)
    caption = (
        "Measured on CPU, float32; dates and versions are those of the tables that "
        f"the numbers come from. {missed} of {len(rows)} targets are missed. Within "
        "the spread: the limit lies between the quartiles of the rounds."
    )
    return caption, ["what", "where", "target", "measured", ""], rows


def _quartiles(row: dict[str, Any]) -> tuple[float, float]:
    low, high = row.get("quartiles", (row["ratio"], row["ratio"]))
    return low, high
