"""Rules by name: what a replay runs, and grids of it.

A variant is a factory of the library with options, as one would write it in a training
script. The factory itself checks the options and supplies the defaults; the rule object
is the one that it would build.
"""

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import adagc_jax as aj


class Method(NamedTuple):
    """A factory, the class of its rule, and what is fixed in it."""

    factory: Callable[..., Any]
    rule: type[Any]
    whole: bool = False
    fixed: tuple[tuple[str, Any], ...] = ()


METHODS = {
    "adagc": Method(aj.adagc, aj.EmaRatio),
    "adagc-ema": Method(aj.adagc, aj.EmaRatio, fixed=(("warmup_init", "ema"),)),
    "adagc-global": Method(aj.adagc, aj.EmaRatio, whole=True),
    "robust_gc": Method(aj.robust_gc, aj.EmaRatio),
    "zclip": Method(aj.zclip, aj.ZScore, whole=True),
    "global_gc": Method(aj.global_gc, aj.FixedNorm, whole=True),
    "tensor_gc": Method(aj.tensor_gc, aj.FixedNorm),
}

GRIDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "adagc": {
        "warmup_init": ("min", "ema"),
        "lambda_rel": (1.02, 1.04, 1.1, 1.25, 1.5),
        "beta": (0.98, 0.99, 0.999),
    },
    "zclip": {"z_thresh": (2.0, 2.5, 3.0, 4.0), "alpha": (0.9, 0.97, 0.99)},
    "global_gc": {"max_norm": (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)},
    "tensor_gc": {"max_norm": (0.01, 0.03, 0.1, 0.3, 1.0)},
}
for _name in ("adagc-ema", "adagc-global", "robust_gc"):
    GRIDS[_name] = {k: GRIDS["adagc"][k] for k in ("lambda_rel", "beta")}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One setting of one method.

    Attributes:
      method: Name of the method, a key of `METHODS`.
      options: Options that differ from the factory's defaults, by name.
    """

    method: str = "adagc"
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def whole(self) -> bool:
        """Whether all tensors are one group."""
        return METHODS[self.method].whole

    @property
    def values(self) -> dict[str, Any]:
        """All options, defaults included."""
        return option_defaults(self.method) | dict(self.options)

    def rule(self, **traced: Any) -> aj.Rule:
        """The rule that the factory builds, with some numbers traced."""
        kind = METHODS[self.method].rule
        return kind(**(self.values | traced))

    def __str__(self) -> str:
        fixed = dict(METHODS[self.method].fixed)
        shown = [f"{k}={v}" for k, v in self.options if k not in fixed]
        return f"{self.method}({', '.join(shown)})"


def make_variant(method: str = "adagc", **options: Any) -> Variant:
    """A method with options, checked as its factory checks them.

    Args:
      method: ``adagc``, ``adagc-ema`` (``warmup_init="ema"``), ``adagc-global`` (the
        whole tree as one group), ``robust_gc``, ``zclip``, ``global_gc`` or
        ``tensor_gc``.
      **options: Hyper-parameters of the factory, as numbers, text or bools.

    Returns:
      A `Variant`.

    Raises:
      ValueError: for an unknown method or option, or a value out of its range.

    Example:
      >>> str(make_variant("adagc", lambda_rel=1.1))
      'adagc(lambda_rel=1.1)'
    """
    if method == "agc":
        raise ValueError(
            "method 'agc' cannot be replayed: it compares gradients with parameters, "
            "and a log of norms has no parameters. Choose one of " + ", ".join(METHODS)
        )
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}.")
    defaults = option_defaults(method)
    for name in options:
        if name not in defaults:
            raise ValueError(
                f"{method} has no option {name!r}; it has {', '.join(defaults)}."
            )
        if callable(options[name]):
            raise ValueError(f"{name} must be a number or text here, not a schedule.")
    fixed = dict(METHODS[method].fixed)
    for name in set(fixed) & set(options):
        if options[name] != fixed[name]:
            raise ValueError(
                f"{method} has {name}={fixed[name]!r}, got {options[name]!r}: leave it "
                "out, or take the method without it."
            )
    METHODS[method].factory(**(fixed | options))
    return Variant(method, tuple((fixed | options).items()))


def labels(variants: Sequence[Variant]) -> tuple[str, list[str]]:
    """What all variants share, and what is left to tell one from another."""
    rows = [{"rule": v.method, **v.values} for v in variants]
    names = list(dict.fromkeys(name for row in rows for name in row))
    varied = [n for n in names if _varies(n, rows)]
    given = {"rule"} | {name for v in variants for name, _ in v.options}
    shared = [n for n in names if n in given and len({r.get(n) for r in rows}) == 1]
    if not varied:
        return "", [str(variant) for variant in variants]

    def text(row: Mapping[str, Any], wanted: Sequence[str]) -> str:
        parts = [f"{n}={row[n]}" if n != "rule" else row[n] for n in wanted if n in row]
        return ", ".join(parts)

    return text(rows[0], shared), [text(row, varied) for row in rows]


def _varies(name: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a number differs between variants of the same method."""
    if name == "rule":
        return len({row["rule"] for row in rows}) > 1
    return len({(row["rule"], row.get(name)) for row in rows}) > len(
        {row["rule"] for row in rows}
    )


def option_defaults(method: str) -> dict[str, Any]:
    """Options of a method with the defaults of its factory.

    A factory has other arguments as well (masks, groups), but a rule has only these.
    """
    parameters = inspect.signature(METHODS[method].factory).parameters
    numbers = {field.name for field in dataclasses.fields(METHODS[method].rule)}
    defaults = {k: p.default for k, p in parameters.items() if k in numbers}
    return defaults | dict(METHODS[method].fixed)


def make_grid(
    base: Variant, axes: Mapping[str, Sequence[Any]] | None = None
) -> list[Variant]:
    """All combinations of some values, around one variant.

    Args:
      base: Supplies the method and the options that are not varied.
      axes: Values for each option; ``"rule"`` for methods, of which each takes the
        options that it has. None for a grid that suits the method of ``base``.

    Returns:
      Variants without repeats, in the order of the axes.

    Raises:
      ValueError: for an option that no method of the grid has, or a bad value.

    Example:
      >>> grid = make_grid(make_variant("adagc"), {"beta": (0.98, 0.99)})
      >>> [str(variant) for variant in grid]
      ['adagc(beta=0.98)', 'adagc(beta=0.99)']
    """
    axes = dict(GRIDS[base.method] if axes is None else axes)
    methods = axes.pop("rule", (base.method,))
    grid: dict[Variant, None] = {}
    used: set[str] = set()
    for method in methods:
        fixed = dict(METHODS[make_variant(method).method].fixed)
        free = set(option_defaults(method)) - set(fixed)
        mine = {name: values for name, values in axes.items() if name in free}
        used |= set(mine)
        of_base = dict(METHODS[base.method].fixed)
        kept = {k: v for k, v in base.options if k in free and k not in of_base}
        for point in itertools.product(*mine.values()):
            options = kept | dict(zip(mine, point, strict=True))
            grid[make_variant(method, **options)] = None
    if unused := set(axes) - used:
        raise ValueError(
            f"no method of the grid ({', '.join(methods)}) has the option "
            f"{', '.join(sorted(unused))}."
        )
    return list(grid)
