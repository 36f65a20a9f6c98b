"""Names of groups: a slice of a stacked tensor is called as if it were listed.

A model with a list of layers has leaves such as ``layers/3/attn/q``; stacked, it has
one leaf ``layers/attn/q`` with a group per layer. Metrics, reports and logs name the
groups alike for both, so that dashboards survive a change of layout.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from adagc_jax.layout import Layout

_LAYERS = re.compile(r"(.*_)?(layer|block|stage|stack)s?|scan.*", re.IGNORECASE)
_EXPERTS = re.compile(r"expert|moe", re.IGNORECASE)
# The path of a tree that is one bare array is empty, which no logger likes.
_BARE = "array"


def names_in_parts(layouts: Sequence[Layout]) -> list[tuple[str, ...]]:
    """One name per group of each layout, in the order of its parts.

    Args:
      layouts: Layouts whose names must not clash with one another's.

    Returns:
      For each layout the names of its groups: first those of the leaves that share a
      vector, then those of the leaves apart, each in row-major order. No name is given
      twice, in all of them together.

    Example:
      >>> from adagc_jax.layout import Layout
      >>> layout = Layout(
      ...     paths=("head", "layers/moe/experts/w"), axes=((), (0, 1)),
      ...     shapes=((), (1, 2)),
      ... )
      >>> names_in_parts([layout])
      [('head', 'layers/0/moe/experts/0/w', 'layers/0/moe/experts/1/w')]
    """
    per_leaf = iter(leaf_names(_joined(layouts)))
    result = []
    for layout in layouts:
        own = [next(per_leaf) for _ in layout.paths]
        is_apart = [bool(axes) or not layout.packed for axes in layout.axes]
        # Sorting is stable: within the vector, and apart, the tree's order is kept.
        order = sorted(range(len(own)), key=is_apart.__getitem__)
        result.append(tuple(name for i in order for name in own[i]))
    return result


def leaf_names(layout: Layout) -> list[list[str]]:
    """The names of each leaf's groups, in row-major order.

    The indices of a group go behind the segments of the path that name a stack
    (``layers``, ``blocks``, ``stages``, ``stack``, ``scan...``; ``experts``, ``moe``)
    and are not followed by a number already; what is left over goes to the end. Leaves
    for which that makes a name that another leaf has are named ``layers/q[3]`` instead,
    and so are leaves whose groups are shards, which no listed model has.

    Example:
      >>> from adagc_jax.layout import Layout
      >>> leaf_names(Layout(paths=("layers/q",), axes=((0,),), shapes=((2,),)))
      [['layers/0/q', 'layers/1/q']]
    """
    layer_axes = _layer_axes(layout)
    names = [
        [_unrolled(path, axes, index, layer_axes) for index in np.ndindex(*shape)]
        for path, axes, shape in zip(
            layout.paths, layout.axes, layout.shapes, strict=True
        )
    ]
    shared = _repeated(names)
    for leaf, shards in enumerate(_shards(layout)):
        if shards or (layout.shapes[leaf] and not shared.isdisjoint(names[leaf])):
            names[leaf] = _bracketed(layout.paths[leaf], layout.shapes[leaf])
    return _told_apart(names)


def _joined(layouts: Sequence[Layout]) -> Layout:
    return Layout(
        paths=tuple(path for layout in layouts for path in layout.paths),
        axes=tuple(axes for layout in layouts for axes in layout.axes),
        shapes=tuple(shape for layout in layouts for shape in layout.shapes),
        shards=tuple(words for layout in layouts for words in _shards(layout)),
    )


def _shards(layout: Layout) -> tuple[str, ...]:
    return layout.shards or ("",) * len(layout.paths)


def _unrolled(
    path: str,
    axes: tuple[int, ...],
    index: tuple[int, ...],
    layer_axes: dict[str, int],
) -> str:
    """The name of a slice in the model in which stacks are lists."""
    segments = path.split("/") if path else [_BARE]
    places = _stack_places(segments, len(index))
    where = list(zip(axes, index, strict=True))
    if len(places) > 1:
        # MaxText stacks on axis 1, behind the experts: the layer's index comes first.
        layer_axis = layer_axes.get(_up_to(segments, places[0]))
        where.sort(key=lambda pair: pair[0] != layer_axis)
    numbers = [str(number) for _, number in where]
    for place, number in reversed(list(zip(places, numbers, strict=False))):
        segments.insert(place + 1, number)
    return "/".join(segments + numbers[len(places) :])


def _stack_places(segments: list[str], count: int) -> list[int]:
    """Positions of the at most ``count`` segments that an index goes behind."""
    free = [
        place
        for place, (_, after) in enumerate(
            zip(segments, [*segments[1:], ""], strict=True)
        )
        if not after.isdecimal()
    ]
    layers = [p for p in free if _LAYERS.fullmatch(segments[p])]
    experts = [p for p in free if p not in layers and _EXPERTS.search(segments[p])]
    # In "moe/experts" the inner one counts; with a single index, the layers do.
    experts = experts[-1:]
    chosen = layers[: max(1, count - len(experts))] + experts
    return sorted(chosen[:count])


def _layer_axes(layout: Layout) -> dict[str, int]:
    """For each stack the axis that its leaves with a single kept axis agree on."""
    found: dict[str, set[int]] = defaultdict(set)
    leaves = zip(layout.paths, layout.axes, _shards(layout), strict=True)
    for path, axes, shards in leaves:
        segments = path.split("/")
        is_plain = len(axes) == 1 and not shards
        for place in _stack_places(segments, 1) if is_plain else ():
            found[_up_to(segments, place)].update(axes)
    return {stack: min(axes) for stack, axes in found.items() if len(axes) == 1}


def _up_to(segments: list[str], place: int) -> str:
    return "/".join(segments[: place + 1])


def _bracketed(path: str, shape: tuple[int, ...]) -> list[str]:
    indices = (",".join(map(str, index)) for index in np.ndindex(*shape))
    return [
        f"{path or _BARE}[{index}]" if index else path or _BARE for index in indices
    ]


def _repeated(names: Iterable[Iterable[str]]) -> set[str]:
    counts = Counter(name for own in names for name in own)
    return {name for name, count in counts.items() if count > 1}


def _told_apart(names: list[list[str]]) -> list[list[str]]:
    """Numbers names that are still alike: keys with slashes can make any path."""
    taken = {name for own in names for name in own}
    seen: set[str] = set()
    for own in names:
        for i, name in enumerate(own):
            number = 1
            while own[i] in seen:
                candidate = f"{name}~{number}"
                own[i] = name if candidate in taken else candidate
                number += 1
            seen.add(own[i])
            taken.add(own[i])
    return names
