"""Groups: which gradients are clipped together.

A group is the whole tree, one leaf, or one slice of a leaf along *kept* axes. There
are two kinds of kept axes. *Stacked* axes hold separate tensors of one model (the
layers of a scanned block, the experts of a mixture): each slice has its own place in
the metrics. *Unit* axes index the output units of one tensor, as in AGC: each unit
has its own scale, and the metrics sum them up per tensor.

Specs are frozen, printable and hashable, and know nothing of arrays; `kept_axes`
turns one into axes for the leaves of a tree.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from adagc_jax.checks import check_choice
from adagc_jax.leaves import Leaf, broadcast_prefix, check_patterns_used, first_match

Axes = int | tuple[int, ...] | None
AxesSpec = Any  # Axes, {pattern: Axes}, prefix tree of Axes, or (path, leaf) -> Axes
UnitSpec = Any  # "output", "tensor", Axes, or {pattern: one of these}


class KeptAxes(NamedTuple):
    """Kept axes of one leaf, each non-negative and in increasing order."""

    stacked: tuple[int, ...]
    unit: tuple[int, ...]

    @property
    def all(self) -> tuple[int, ...]:
        """Stacked and unit axes together."""
        return tuple(sorted(self.stacked + self.unit))


@dataclasses.dataclass(frozen=True)
class Patterns:
    """``(regular expression, value)`` pairs; the first that is found in a path wins."""

    rules: tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Prefix:
    """A prefix tree of axes, kept flat so that it can be hashed."""

    treedef: Any
    values: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Groups:
    """What is clipped together. Made by the functions of this module."""

    whole: bool = False
    stack: Any = ()
    unit: Any = "tensor"
    layout: str = "IO"


def per_tensor() -> Groups:
    """Every leaf is one group.

    Example:
      >>> import adagc_jax
      >>> adagc_jax.per_tensor()
      Groups(whole=False, stack=(), unit='tensor', layout='IO')
    """
    return Groups()


def whole_tree() -> Groups:
    """All clipped leaves together are one group: its norm is the global norm.

    Example:
      >>> import adagc_jax
      >>> adagc_jax.whole_tree().whole
      True
    """
    return Groups(whole=True)


def stacked(axes: AxesSpec) -> Groups:
    """Every slice along the stacked axes is one group: a layer, an expert.

    Args:
      axes: Which axes of a leaf are stacked. One of: an int or a tuple of ints, for
        every leaf; a mapping from regular expressions, searched in paths such as
        ``layers/attn/q``, to axes (the first match wins, a leaf without a match has no
        stacked axis); a prefix tree of axes; or a function of ``(path, leaf)``.
        Negative axes count from the end; ``None`` and ``()`` mean none.

    Returns:
      A group spec: for ``{"layers/": 0, "experts/": (0, 1)}`` a leaf of shape
      ``[L, ...]`` makes ``[L]`` groups and one of shape ``[L, E, ...]`` makes
      ``[L, E]``.

    Raises:
      ValueError: for axes that are neither; when the spec meets a tree, for an axis
        out of range or a pattern that matches nothing.

    Example:
      >>> import adagc_jax
      >>> clip = adagc_jax.adagc(groups=adagc_jax.stacked({"layers/": 0}))
    """
    return Groups(stack=_frozen_axes(axes))


def units(
    unit: UnitSpec = "output", layout: str = "IO", stacked: AxesSpec = ()
) -> Groups:
    """Every output unit of a tensor is one group, as in AGC (arXiv 2102.06171).

    Args:
      unit: ``"output"``: by rank and ``layout``; ``"tensor"``: the whole tensor is one
        unit; an int or tuple: the axes that index the units (0 makes the rows of an
        embedding units); or a mapping from path patterns to one of these, where a leaf
        without a match gets ``"output"``.
      layout: ``"IO"``, the unit axis is last, as in JAX (``[in, out]``, ``HWIO``):
        rank 2 and 3 reduce axis 0, rank 4 axes 0-2, rank 5 axes 0-3. ``"OI"``, the unit
        axis is first, as in PyTorch. Leaves of rank 0 and 1 are one unit.
      stacked: Axes kept apart before ranks are counted, as in `stacked`.

    Returns:
      A group spec.

    Raises:
      ValueError: for an unknown ``unit`` or ``layout``; when the spec meets a tree, for
        a leaf of rank above 5 without explicit axes.

    Example:
      >>> import adagc_jax
      >>> rows = adagc_jax.units({"embed": 0})
    """
    check_choice("layout", layout, ("IO", "OI"))
    if isinstance(unit, Mapping):
        frozen = Patterns(tuple((p, _frozen_unit(u)) for p, u in unit.items()))
    else:
        frozen = _frozen_unit(unit)
    return Groups(stack=_frozen_axes(stacked), unit=frozen, layout=layout)


def kept_axes(groups: Groups, tree: Any, leaves: Sequence[Leaf]) -> list[KeptAxes]:
    """The kept axes of every leaf of ``leaves``; a whole-tree group keeps none."""
    if groups.whole:
        return [KeptAxes((), ()) for _ in leaves]
    per_stack = _stacked_axes(groups.stack, tree, leaves)
    per_unit = _units(groups.unit, leaves)
    return [
        _leaf_axes(leaf, stack, unit, groups.layout)
        for leaf, stack, unit in zip(leaves, per_stack, per_unit, strict=True)
    ]


def _is_axes(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def _frozen_axes(axes: AxesSpec) -> Any:
    if _is_axes(axes) or callable(axes):
        return axes
    if isinstance(axes, Mapping) and all(
        isinstance(k, str) and _is_axes(v) for k, v in axes.items()
    ):
        return Patterns(tuple(axes.items()))
    values, treedef = jax.tree.flatten(axes, is_leaf=_is_axes)
    for value in values:
        if not _is_axes(value):
            raise ValueError(
                f"axes must be ints, tuples of ints or None, got {value!r} in {axes!r}."
            )
    return Prefix(treedef, tuple(values))


def _frozen_unit(unit: UnitSpec) -> Any:
    if _is_axes(unit) or unit in ("output", "tensor"):
        return unit
    raise ValueError(
        "unit must be 'output', 'tensor', the axes that index the units, or a mapping "
        f"from path patterns to one of these, got {unit!r}."
    )


def _stacked_axes(spec: Any, tree: Any, leaves: Sequence[Leaf]) -> list[Any]:
    if isinstance(spec, Patterns):
        return _by_pattern("stacked axes", spec, leaves, default=None)
    if isinstance(spec, Prefix):
        prefix = jax.tree.unflatten(spec.treedef, spec.values)
        every = broadcast_prefix("stacked axes", prefix, tree, _is_axes)
        return [every[leaf.position] for leaf in leaves]
    if callable(spec):
        return [spec(leaf.path, leaf.value) for leaf in leaves]
    return [spec] * len(leaves)


def _units(spec: Any, leaves: Sequence[Leaf]) -> list[Any]:
    if isinstance(spec, Patterns):
        return _by_pattern("unit", spec, leaves, default="output")
    return [spec] * len(leaves)


def _by_pattern(
    argument: str, patterns: Patterns, leaves: Sequence[Leaf], default: Any
) -> list[Any]:
    expressions = [expression for expression, _ in patterns.rules]
    check_patterns_used(argument, expressions, [leaf.path for leaf in leaves])
    hits = [first_match(leaf.path, expressions) for leaf in leaves]
    values = [value for _, value in patterns.rules]
    return [default if hit is None else values[hit] for hit in hits]


def _leaf_axes(leaf: Leaf, stack: Axes, unit: Any, layout: str) -> KeptAxes:
    ndim = jax.numpy.ndim(leaf.value)
    stack_axes = _normalised("stacked axes", stack, leaf, ndim)
    if unit == "tensor":
        return KeptAxes(stack_axes, ())
    if unit == "output":
        rest = [axis for axis in range(ndim) if axis not in stack_axes]
        return KeptAxes(stack_axes, _output_axes(rest, layout, leaf))
    unit_axes = _normalised("unit", unit, leaf, ndim)
    if set(unit_axes) & set(stack_axes):
        raise ValueError(
            f"unit axes {unit_axes} of {leaf.path!r} are stacked axes as well "
            f"({stack_axes}): name each axis once."
        )
    return KeptAxes(stack_axes, unit_axes)


def _normalised(argument: str, axes: Axes, leaf: Leaf, ndim: int) -> tuple[int, ...]:
    if not _is_axes(axes):
        raise ValueError(
            f"{argument} for {leaf.path!r} must be ints, a tuple of ints or None, "
            f"got {axes!r}."
        )
    wanted = (axes,) if isinstance(axes, int) else axes or ()
    for axis in wanted:
        if not -ndim <= axis < ndim:
            raise ValueError(
                f"{argument}: axis {axis} is out of range for {leaf.path!r} of shape "
                f"{jax.numpy.shape(leaf.value)}. Name the leaves that have it by "
                "pattern, or leave this one out."
            )
    return tuple(sorted({axis % ndim for axis in wanted}))


def _output_axes(axes: list[int], layout: str, leaf: Leaf) -> tuple[int, ...]:
    """The unit axes among ``axes``, the axes of a tensor without its stacked ones."""
    rank = len(axes)
    if rank <= 1:
        return ()
    if layout == "OI":
        return (axes[0],)
    if rank > 5:
        raise ValueError(
            f"unit='output' knows ranks up to 5, but {leaf.path!r} has shape "
            f"{jax.numpy.shape(leaf.value)}: give the unit axes of this leaf."
        )
    return tuple(axes[1:]) if rank <= 3 else (axes[-1],)
