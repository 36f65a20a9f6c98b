"""Groups: which gradients are clipped together.

A group is the whole tree, one leaf, or one slice of a leaf along *kept* axes. There
are two kinds of kept axes. *Stacked* axes hold separate tensors of one model (the
layers of a scanned block, the experts of a mixture): each slice has its own place in
the metrics. *Unit* axes index the output units of one tensor, as in AGC: each unit
has its own scale, and the metrics sum them up per tensor.

Specs are frozen, printable and hashable, and know nothing of arrays; module `kept`
turns one into axes for the leaves of a tree.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Sharding

from adagc_jax.checks import check_choice

Axes = int | tuple[int, ...] | None
AxesSpec = Any  # Axes, {pattern: Axes}, prefix tree of Axes, or (path, leaf) -> Axes
UnitSpec = Any  # "output", "tensor", Axes, or {pattern: one of these}


TYPED = "typed"  # shardings are read from the types of leaves


@dataclasses.dataclass(frozen=True)
class Patterns:
    """``(regular expression, value)`` pairs; the first that is found in a path wins."""

    rules: tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Prefix:
    """A prefix tree of axes or shardings, kept flat so that it can be hashed."""

    treedef: Any
    values: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Groups:
    """What is clipped together. Made by the functions of this module.

    ``stack=None`` means that nobody has said what is stacked: as if nothing were, but
    a tree that looks stacked is warned about.
    """

    whole: bool = False
    stack: Any = ()
    unit: Any = "tensor"
    layout: str = "IO"
    shards: Any = None


def per_tensor() -> Groups:
    """Every leaf is one group.

    Example:
      >>> import adagc_jax
      >>> adagc_jax.per_tensor()
      Groups(whole=False, stack=(), unit='tensor', layout='IO', shards=None)
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
    unit: UnitSpec = "output", layout: str = "IO", stacked: AxesSpec = None
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


def per_shard(shardings: Any = None, stacked: AxesSpec = ()) -> Groups:
    """Every shard of a leaf is one group: AdaGC-Shard, without any communication.

    The norm of a group is that of the block of the gradient which one device holds (and
    its replicas). Shards are clipped apart from one another, so the same model is
    clipped otherwise on another mesh, and its state belongs to the mesh: an update
    with other blocks is refused. Use it under ``jit``, not inside ``shard_map``.

    Args:
      shardings: A prefix tree of ``jax.sharding.NamedSharding``, such as
        ``jax.tree.map(lambda p: p.sharding, params)``. None reads them from the types
        of the leaves, which works on meshes with explicit axes.
      stacked: Axes of stacked layers or experts, kept apart as well, as in `stacked`.

    Returns:
      A group spec: a leaf ``[R, C]`` sharded ``P("fsdp", "tensor")`` on a 4 x 2 mesh
      makes ``[4, 2]`` groups; a replicated leaf makes one.

    Raises:
      ValueError: for something other than shardings; when the spec meets a tree, for a
        leaf without a known sharding, or not divisible into its shards.

    Example:
      >>> import adagc_jax, jax
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> sharding = NamedSharding(jax.make_mesh((1,), ("fsdp",)), P("fsdp"))
      >>> clip = adagc_jax.adagc(groups=adagc_jax.per_shard(sharding))

    Reference:
      AdaGC-Shard, https://arxiv.org/abs/2502.11034.
    """
    values, treedef = jax.tree.flatten(shardings, is_leaf=is_sharding)
    for value in values:
        if not is_sharding(value):
            raise ValueError(
                "shardings must be a prefix tree of jax.sharding.NamedSharding, got "
                f"{value!r} in it."
            )
    spec = TYPED if shardings is None else Prefix(treedef, tuple(values))
    return Groups(stack=_frozen_axes(stacked), shards=spec)


def is_axes(value: Any) -> bool:
    """Whether a value is ``Axes``: an int, a tuple of ints or None."""
    if isinstance(value, tuple):
        return all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def is_sharding(value: Any) -> bool:
    """Whether a value is a sharding, and not a tree of them."""
    return isinstance(value, Sharding)


def _frozen_axes(axes: AxesSpec) -> Any:
    if is_axes(axes) or callable(axes):
        return axes
    if isinstance(axes, Mapping) and all(
        isinstance(k, str) and is_axes(v) for k, v in axes.items()
    ):
        return Patterns(tuple(axes.items()))
    values, treedef = jax.tree.flatten(axes, is_leaf=is_axes)
    for value in values:
        if not is_axes(value):
            raise ValueError(
                f"axes must be ints, tuples of ints or None, got {value!r} in {axes!r}."
            )
    return Prefix(treedef, tuple(values))


def _frozen_unit(unit: UnitSpec) -> Any:
    if is_axes(unit) or unit in ("output", "tensor"):
        return unit
    raise ValueError(
        "unit must be 'output', 'tensor', the axes that index the units, or a mapping "
        f"from path patterns to one of these, got {unit!r}."
    )
