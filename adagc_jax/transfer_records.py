"""An optimizer state taken apart into records, which two states have in common or not.

A *record* is a named tuple somewhere in a state (``ScaleByAdamState``, ``ClipState``)
with the numbers that it holds itself; those of a named tuple inside it are that one's.
A clipper's state makes one record for its metrics and one for each rule. Every number,
or array of one tensor, has a key in its record: the field, and behind it the path of
the tensor if it belongs to one. Where it lies in the flattened state says its `Slot`: a
clipper keeps the numbers of many tensors in one array.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from adagc_jax.layout import WHOLE, Layout
from adagc_jax.restore import names_of
from adagc_jax.state import ClipState, StageState

Key = tuple[str, ...]
KeyPath = tuple[Any, ...]


class Form(NamedTuple):
    """What must be alike for numbers of one state to make sense in another."""

    shape: tuple[int, ...]
    dtype: str
    groups: tuple[Any, ...] = ()


class Slot(NamedTuple):
    """Where numbers are in a flattened state.

    Attributes:
      leaf: Index of the array.
      place: Index in that array, a vector; None if all of it is meant.
      form: Shape and dtype, and for a clipper's numbers which groups they are of.
      path: Their name: ``0/stages/0/rule/gamma/layers/w``.
    """

    leaf: int
    place: int | None
    form: Form
    path: str


class Record(NamedTuple):
    """A named tuple of a state and the numbers it holds itself.

    Attributes:
      kind: Its type; for a rule of a clipper that of the rule's state.
      site: Fields and keys on the way to it, without indices.
      path: All of the way to it.
      clipper: For a rule: path of the record of its clipper.
      slots: Its numbers, by key.
    """

    kind: type
    site: tuple[str, ...]
    path: str
    clipper: str | None
    slots: dict[Key, Slot]

    @property
    def title(self) -> str:
        """``1/0 ScaleByAdamState``."""
        return f"{self.path} {self.kind.__name__}".strip()


def take_apart(state: Any, params: Any) -> list[Record]:
    """The records of a state, an outer one before those in it.

    Args:
      state: Any optimizer state, also of ``jax.ShapeDtypeStruct``.
      params: The parameters. Named tuples that occur in them are no records.
    """
    return list(_visit(state, (), _types_in(params), itertools.count()))


def is_named_tuple(x: Any) -> bool:
    """Whether ``x`` is an instance of a named tuple."""
    return isinstance(x, tuple) and hasattr(x, "_fields")


def _types_in(tree: Any) -> frozenset[type]:
    """Types of the named tuples in a tree."""
    found: frozenset[type] = frozenset()
    for node in jax.tree.leaves(tree, is_leaf=is_named_tuple):
        if is_named_tuple(node):
            found |= {type(node)}.union(*(_types_in(child) for child in node))
    return found


def _visit(
    node: Any, keys: KeyPath, not_records: frozenset[type], count: Iterator[int]
) -> Iterator[Record]:
    if isinstance(node, ClipState):
        yield from _visit_clipper(node, keys, count)
        return

    def is_record(x: Any) -> bool:
        return x is not node and is_named_tuple(x) and type(x) not in not_records

    slots: dict[Key, Slot] = {}
    inner: list[Record] = []
    for way, child in jax.tree_util.tree_leaves_with_path(node, is_leaf=is_record):
        if is_record(child):
            inner += _visit(child, keys + way, not_records, count)
        else:
            path = "/".join(names_of(keys + way))
            slots[_key(way)] = Slot(next(count), None, _form(child), path)
    if slots:
        yield Record(type(node), _site(keys), "/".join(names_of(keys)), None, slots)
    yield from inner


def _visit_clipper(
    state: ClipState, keys: KeyPath, count: Iterator[int]
) -> Iterator[Record]:
    """The numbers in the order of the state: step, rules, metrics."""
    path = "/".join(names_of(keys))
    report, *layouts = _layouts(state, path)

    def slots(fields: dict[str, Any], layout: Layout, start: str) -> dict[Key, Slot]:
        return {
            key: slot._replace(path="/".join(filter(None, (start, *key))))
            for name, field in fields.items()
            for key, slot in _field_slots(name, field, layout, report.paths, count)
        }

    own = slots({"clip_step": state.clip_step}, report, path)
    rules = []
    for number, (stage, layout) in enumerate(zip(state.stages, layouts, strict=True)):
        start = "/".join((*names_of(keys), "stages", str(number)))
        fields = _children(stage.rule)
        numbers = slots({"seen": stage.seen} | fields, layout, start)
        kind = type(stage.rule) if fields else StageState
        rules.append(Record(kind, _site(keys), start, path, numbers))
    start = "/".join((*names_of(keys), "metrics"))
    own |= slots(state.metrics._asdict(), report, start)
    yield Record(ClipState, _site(keys), path, None, own)
    yield from rules


def _field_slots(
    name: str,
    field: Any,
    layout: Layout,
    clipped: tuple[str, ...],
    count: Iterator[int],
) -> Iterator[tuple[Key, Slot]]:
    """Those of one field of a clipper, by tensor where the field is packed so."""
    leaves = jax.tree.leaves(field)
    indices = [next(count) for _ in leaves]
    packed = [jnp.shape(leaf) for leaf in leaves] == layout.part_shapes
    if not (packed and layout.paths):
        for number, (index, leaf) in enumerate(zip(indices, leaves, strict=True)):
            key = (name,) if len(leaves) == 1 else (name, str(number))
            yield key, Slot(index, None, _form(leaf), "")
    elif layout == WHOLE:
        # A norm over other tensors says nothing about this one.
        form = Form((), str(leaves[0].dtype), clipped)
        yield (name,), Slot(indices[0], 0, form, "")
    else:
        dtype = str(leaves[0].dtype)
        shards = layout.shards or ("",) * len(layout.paths)
        kept = zip(layout.axes, shards, strict=True)
        for path, groups, shape, (part, place) in zip(
            layout.paths, kept, layout.shapes, _places(layout), strict=True
        ):
            form = Form(shape, dtype, groups)
            yield (name, path), Slot(indices[part], place, form, "")


def _places(layout: Layout) -> list[tuple[int, int | None]]:
    """The part of each leaf, and its place in that part if it is the vector."""
    in_vector, apart = layout.places()
    first = len(layout.part_shapes) - len(apart)
    places: dict[int, tuple[int, int | None]] = {
        leaf: (0, place) for place, leaf in enumerate(in_vector)
    }
    places |= {leaf: (first + part, None) for part, leaf in enumerate(apart)}
    return [places[leaf] for leaf in range(len(layout.paths))]


def _layouts(state: ClipState, path: str) -> tuple[Layout, ...]:
    if state.labels.layouts:
        return state.labels.layouts
    if any(jnp.size(x) for x in jax.tree.leaves(state.metrics.norm_before)):
        raise ValueError(
            f"The clipping state at {path!r} in old_state has lost the names of its "
            "tensors, as in a checkpoint format that keeps arrays only. Put them back "
            "with restore_state(old_state, old_optimizer, old_params)."
        )
    return (Layout((), (), ()),) * (1 + len(state.stages))


def _children(node: Any) -> dict[str, Any]:
    """The fields of a rule's state."""
    ways, _ = jax.tree_util.tree_flatten_with_path(node, lambda x: x is not node)
    return {"/".join(("rule", *names_of(way))): child for way, child in ways}


def _key(way: KeyPath) -> Key:
    # The boxes of Flax add it, and a tensor is the same with and without its box.
    boxed = way[-1:] == (jax.tree_util.GetAttrKey("value"),)
    return names_of(way[:-1] if boxed else way)


def _site(keys: KeyPath) -> tuple[str, ...]:
    named = [k for k in keys if not isinstance(k, jax.tree_util.SequenceKey)]
    return names_of(named)


def _form(leaf: Any) -> Form:
    return Form(jnp.shape(leaf), str(getattr(leaf, "dtype", type(leaf).__name__)))
