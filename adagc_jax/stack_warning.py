"""A warning for trees that look stacked and were given to a per-tensor clipper.

A side door of the flow of data: `init` of a clipper without a group spec shows it
paths and shapes, nothing else. A stack that is clipped as one tensor is not the
published method, and nothing in the numbers would tell.
"""

import re
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

Shape = tuple[int, ...]
Axes = tuple[int, ...]

# Linen calls a scanned or vmapped module ScanLayer_0 or VmapExpert_0 by itself.
# Haiku has __layer_stack_no_per_layer; single names are those of Hugging Face.
_STACK = re.compile(
    r"\w*(layers|blocks|experts|layer_stack\w*)|layer|block|h|stack"
    r"|(Scan|Vmap)[A-Z]\w*_\d+"
)
_EXPERTS = re.compile(r"\w*experts|Vmap[A-Z]\w*_\d+")
_MIXTURE = re.compile(r"moe|expert", re.IGNORECASE)
_WINDOWS = (3, 5, 7, 9, 11)
_MIN_LEAVES = 4
_MIN_EXPERT_LEAVES = 2
# Packages whose lines say nothing about where a tree comes from.
_PASSED_THROUGH = ("adagc_jax", "optax", "jax", "flax", "contextlib", "functools")

_SEEN: set[tuple[tuple[str, ...], tuple[Shape, ...]]] = set()


class StackedTreeWarning(UserWarning):
    """A tree looks stacked, but no group spec says so.

    Write the ``groups`` that the warning shows, or ``groups=per_tensor()`` to say that
    each leaf is one tensor.
    """


class _Stack(NamedTuple):
    """Leaves below one path that have ``size`` on ``axis``; ``axes`` has outer ones."""

    start: str
    members: tuple[str, ...]
    axis: int
    size: int
    axes: Axes


def warn_if_stacked(paths: Sequence[str], shapes: Sequence[Shape]) -> None:
    """Warns about a tree that looks stacked, once per process and tree.

    The line it shows is the nearest that is neither here nor in JAX, Optax or Flax:
    usually the one that calls ``init``, through whatever chain.

    Args:
      paths: Paths of the clipped leaves.
      shapes: Their shapes.
    """
    key = (tuple(paths), tuple(map(tuple, shapes)))
    if key in _SEEN:
        return
    _SEEN.add(key)
    message = looks_stacked(paths, shapes)
    if message is not None:
        warnings.warn(message, StackedTreeWarning, stacklevel=_users_level())


def _users_level() -> int:
    """The ``stacklevel`` of a warning of the caller that shows the user's own line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if module.split(".")[0] not in _PASSED_THROUGH:
            break
        level, frame = level + 1, frame.f_back
    return level


def looks_stacked(paths: Sequence[str], shapes: Sequence[Shape]) -> str | None:
    """What to say of a tree that looks stacked, or ``None``.

    It does if at least four leaves (two of experts) lie below a path segment that
    names a stack (``layers``, ``blocks``, ``experts``, ``ScanLayer_0``) with no number
    as a segment further down, and all have the same size of at least 2 on the first
    axis or on the second. Scalars of layers, of shape ``[L]``, may be among them; of
    the others all have at least two axes and some have three.

    A shared size may also be the width of the model or the window of convolutions. So
    it must not be the largest one in half of the leaves, nor be on both axes of a
    matrix, and kernels alone do not count.

    Args:
      paths: Paths of the leaves, such as ``layers/attn/q``.
      shapes: Their shapes.

    Returns:
      A message that names leaves, the group spec to write, and how to silence it.

    Example:
      >>> from adagc_jax.stack_warning import looks_stacked
      >>> paths = [f"layers/{name}" for name in ("k", "norm", "q", "v")]
      >>> shapes = [(12, 64, 64), (12, 64), (12, 64, 64), (12, 64, 64)]
      >>> "adagc_jax.stacked({'^layers/': 0})" in looks_stacked(paths, shapes)
      True
      >>> looks_stacked(paths, [shape[1:] for shape in shapes])
    """
    by_path = dict(zip(paths, map(tuple, shapes), strict=True))
    found = _find_stacks(by_path)
    if not found:
        return None
    places = [
        f"{len(stack.members)} leaves below {stack.start!r} have the size {stack.size} "
        f"on axis {stack.axis}, such as "
        + " and ".join(f"{path} {by_path[path]}" for path in stack.members[:2])
        for stack in found[:4]
    ]
    return (
        f"The tree looks stacked: {'; '.join(places)}. Without groups each leaf is "
        "clipped as one tensor, all its layers or experts together. Give every slice "
        f"a group of its own, groups=adagc_jax.stacked({_spec(found)}), or say that "
        "each leaf is one tensor, groups=adagc_jax.per_tensor()."
        + _on_experts(found, by_path)
    )


def _on_experts(found: Sequence[_Stack], shapes: Mapping[str, Shape]) -> str:
    """A hint for mixtures in a stack, whose experts are not below a path of theirs."""
    axis_of = {
        path: stack.axis
        for stack in found
        for path in stack.members
        if _MIXTURE.search(path.removeprefix(stack.start)) and len(shapes[path]) >= 4
    }
    known = {p for stack in found if len(stack.axes) > 1 for p in stack.members}
    doubtful = [path for path in axis_of if path not in known]
    if not doubtful:
        return ""
    return (
        f" Axis {1 - axis_of[doubtful[0]]} of {' and '.join(doubtful[:2])} may be that "
        "of experts: each is a group of its own with the axes (0, 1), in a pattern for "
        "these leaves in front of the others."
    )


def _find_stacks(shapes: Mapping[str, Shape]) -> list[_Stack]:
    """Stacks, and stacks inside of them; outer ones first."""
    found: list[_Stack] = []
    kept: dict[str, Axes] = dict.fromkeys(shapes, ())
    for start in _starts(shapes):
        below = {p: shape for p, shape in shapes.items() if p.startswith(start)}
        first = next(iter(below))
        # The same for all of them: a path is inside of another or apart from it.
        outer = kept[first]
        axis = _stacked_axis(start, below, outer)
        if axis is not None:
            axes = tuple(sorted((*outer, axis)))
            kept |= dict.fromkeys(below, axes)
            found.append(_Stack(start, tuple(below), axis, below[first][axis], axes))
    return found


def _starts(paths: Iterable[str]) -> list[str]:
    """Beginnings of paths that end with the name of a stack, outer ones first."""
    starts = set()
    for path in paths:
        segments = path.split("/")
        for place, segment in enumerate(segments[:-1], start=1):
            if _STACK.fullmatch(segment):
                starts.add("/".join(segments[:place]) + "/")
    return sorted(starts, key=lambda start: (start.count("/"), start))


def _stacked_axis(start: str, shapes: Mapping[str, Shape], outer: Axes) -> int | None:
    """The axis, other than ``outer``, on which all of ``shapes`` look stacked."""
    segments = [s for path in shapes for s in path.removeprefix(start).split("/")]
    scalars = [s for s in shapes.values() if len(s) - len(outer) == 1]
    below = {p: s for p, s in shapes.items() if len(s) - len(outer) != 1}
    ranks = [len(shape) - len(outer) for shape in below.values()]
    experts = _EXPERTS.fullmatch(start.split("/")[-2]) is not None
    if len(below) < (_MIN_EXPERT_LEAVES if experts else _MIN_LEAVES):
        return None
    if any(s.isdigit() for s in segments) or min(ranks) < 2 or max(ranks) < 3:
        return None
    if all(_is_kernel(path, shape, outer) for path, shape in below.items()):
        return None
    first_two = [axis for axis in range(len(outer) + 2) if axis not in outer]
    sizes = {axis: {shape[axis] for shape in below.values()} for axis in first_two}
    shared = {a: min(s) for a, s in sizes.items() if len(s) == 1}
    # Models are wider than they are deep.
    axis = min(shared, key=lambda axis: shared[axis], default=None)
    if axis is None or shared[axis] < 2:
        return None
    # A window is the first thing in a kernel; experts may be three.
    is_window = axis == first_two[0] and shared[axis] in _WINDOWS and min(ranks) >= 3
    if (is_window and not experts) or not _is_depth(
        axis, list(below.values()), scalars, outer
    ):
        return None
    return axis


def _is_depth(
    axis: int, shapes: Sequence[Shape], scalars: Sequence[Shape], outer: Axes
) -> bool:
    """Whether the size on ``axis`` looks like a number of layers, not like a width."""
    size = shapes[0][axis]
    others = [
        [n for a, n in enumerate(shape) if a != axis and a not in outer]
        for shape in shapes
    ]
    widest = sum(size >= max(rest) for rest in others)
    if any(rest == [size] for rest in others) or 2 * widest >= len(shapes):
        return False
    if not scalars:
        return True
    if axis != min(a for a in range(len(outer) + 1) if a not in outer):
        # They lack the second axis, and one pattern would not do for all.
        return False
    # A vector may as well be a norm of that width: nothing else may speak for it.
    lengths = {n for s in scalars for a, n in enumerate(s) if a not in outer}
    return lengths == {size} and not widest and all(size not in rest for rest in others)


def _is_kernel(path: str, shape: Shape, outer: Axes) -> bool:
    """Whether a leaf looks like a convolution kernel, ``[3, 3, in, out]``."""
    rest = [size for axis, size in enumerate(shape) if axis not in outer]
    window = len(rest) >= 4 and rest[0] == rest[1]
    return len(rest) >= 3 and (window or "conv" in path.lower())


def _spec(found: Sequence[_Stack]) -> dict[str, int | Axes]:
    """The mapping for `stacked`; inner stacks first, as the first match wins."""
    return {
        _pattern(stack.start): stack.axes if len(stack.axes) > 1 else stack.axis
        for stack in reversed(found)
    }


def _pattern(start: str) -> str:
    """A regular expression for a beginning of paths, the same for all of a list."""
    parts = (r"\d+" if s.isdigit() else re.escape(s) for s in start.split("/"))
    return "^" + "/".join(parts)
