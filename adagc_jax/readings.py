"""Reads clipping states: from any optimizer state to columns of numbers with names.

    optimizer state -> ClipStates -> Readings -> metrics, reports

A reading of concrete arrays is NumPy's, fetched in one transfer; of traced ones it
stays in the program.
"""

from typing import Any, NamedTuple

import jax
import jax.core
import numpy as np

from adagc_jax.layout import WHOLE, Layout, load
from adagc_jax.leaves import clipped_leaves
from adagc_jax.names import names_in_parts
from adagc_jax.state import ClipState
from adagc_jax.tables import Table, make_table, rate, xp_of

_RENAMED = {"clipped_in_a_row": "consecutive_clips"}


class Named(NamedTuple):
    """A clipping state, its layouts (the metrics' first) and its groups' names."""

    state: ClipState
    layouts: tuple[Layout, ...]
    names: tuple[str, ...]


class Reading(NamedTuple):
    """What one clipper did.

    Attributes:
      names: One per group of its metrics.
      table: The columns of `ClipMetrics`, ``clip_rate``, and the fields of rules whose
        groups are those of the metrics.
      whole: Fields of rules over the whole tree.
      norm_seen: As in `ClipMetrics`, f32[].
      step: Updates made, i32[].
      rules: For each rule whether it is over the whole tree, and its fields.
    """

    names: tuple[str, ...]
    table: Table
    whole: dict[str, Any]
    norm_seen: Any
    step: Any
    rules: tuple[tuple[bool, tuple[str, ...]], ...]


class Section(NamedTuple):
    """Clippers that are reported together: ``prefix`` is empty or ``"0/"``."""

    prefix: str
    readings: tuple[Reading, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all groups."""
        return tuple(name for reading in self.readings for name in reading.names)

    @property
    def columns(self) -> list[str]:
        """Columns that all clippers have."""
        first, *others = (reading.table.pieces for reading in self.readings)
        return [name for name in first if all(name in other for other in others)]

    def column(self, name: str) -> Any:
        """A column over the groups of all clippers."""
        columns = [reading.table.column(name) for reading in self.readings]
        return xp_of(columns[0]).concatenate(columns)


def read(opt_state: Any, params: Any = None) -> list[Section]:
    """All clippers in an optimizer state.

    Args:
      opt_state: Any optimizer state with a clipper in it, at any depth.
      params: For a state that has lost its names.

    Returns:
      One section if the clippers have different leaves, otherwise one for each, in the
      order of the state.

    Raises:
      ValueError: if there is no clipper, its names are lost, its numbers do not fit
        them, or it has shapes only.
    """
    states = find_clip_states(opt_state)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(states)):
        raise ValueError(
            "opt_state is abstract: its clipping state has shapes and no numbers. "
            "group_names(opt_state) gives the names, and "
            "jax.eval_shape(clip_metrics, opt_state) the shapes of all metrics."
        )
    return [
        Section(prefix, tuple(_reading(*member) for member in members))
        for prefix, members in named_states(opt_state, params, fetch=True)
    ]


def named_states(
    opt_state: Any, params: Any = None, *, fetch: bool = False
) -> list[tuple[str, list["Named"]]]:
    """The clippers of each section, with the names of their groups.

    Args:
      opt_state: Any optimizer state with a clipper in it; may be abstract.
      params: For a state that has lost its names.
      fetch: Whether to turn concrete arrays into NumPy's.

    Returns:
      Prefix and clippers of each section.

    Raises:
      ValueError: as `read` does.
    """
    states = find_clip_states(opt_state)
    if not states:
        raise ValueError(
            "opt_state holds no clipping state. Put a clipper of adagc_jax into the "
            "optimizer, or pass the state of the optimizer that has one."
        )
    states = _on_host(states) if fetch else states
    layouts = [_layouts(state, params) for state in states]
    sections = []
    for prefix, members in _together([layout[0].paths for layout in layouts]):
        names = names_in_parts([layouts[member][0] for member in members])
        named = [
            Named(states[member], layouts[member], own)
            for member, own in zip(members, names, strict=True)
        ]
        sections.append((prefix, named))
    return sections


def find_clip_states(opt_state: Any) -> list[ClipState]:
    """All clipping states inside an optimizer state, in its order."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, ClipState))
    return [node for node in nodes if isinstance(node, ClipState)]


def _on_host(states: list[ClipState]) -> list[ClipState]:
    """NumPy arrays, unless the states are traced or spread over several processes."""
    arrays = [x for x in jax.tree.leaves(states) if isinstance(x, jax.Array)]
    here = all(
        not isinstance(x, jax.core.Tracer)
        and (x.is_fully_addressable or x.is_fully_replicated)
        for x in arrays
    )
    return jax.device_get(states) if here else states


def _together(paths: list[tuple[str, ...]]) -> list[tuple[str, list[int]]]:
    """Which clippers are reported together, and under which prefix."""
    everyone = list(range(len(paths)))
    # Keys with slashes can make a path twice within one clipper: still one clipper.
    own = [set(group) for group in paths]
    if len(set().union(*own)) == sum(map(len, own)):
        return [("", everyone)]
    return [(f"{number}/", [number]) for number in everyone]


def _layouts(state: ClipState, params: Any) -> tuple[Layout, ...]:
    """The state's own layouts, or those that the parameters suggest."""
    layouts = state.labels.layouts or _suggested_layouts(state, params)
    have = [tuple(part.shape) for part in load(state.metrics.norm_before)]
    if have != layouts[0].part_shapes:
        raise ValueError(
            f"The clipping state in opt_state has numbers of shapes {have}, but its "
            f"names are for {layouts[0].part_shapes}. A state from under vmap or scan "
            "must be read there, or one member or step at a time."
        )
    return layouts


def _suggested_layouts(state: ClipState, params: Any) -> tuple[Layout, ...]:
    parts = load(state.metrics.norm_before)
    is_empty = sum(part.size for part in parts) == 0
    leaves = [] if is_empty else clipped_leaves(params, mask=None, exclude=())
    if len(parts) != 1 or parts[0].shape != (len(leaves),):
        raise ValueError(
            "opt_state does not have the names of its tensors (a checkpoint format "
            "kept arrays only, or it comes from inside shard_map), and params, which "
            f"have {len(leaves)} leaves, do not give them back: make one update "
            "first, outside shard_map."
        )
    paths = tuple(leaf.path for leaf in leaves)
    report = Layout(paths, axes=((),) * len(paths), shapes=((),) * len(paths))
    is_whole = [load(s.seen)[0].shape != (len(paths),) for s in state.stages]
    return (report, *(WHOLE if whole else report for whole in is_whole))


def _reading(
    state: ClipState, layouts: tuple[Layout, ...], names: tuple[str, ...]
) -> Reading:
    report, *per_stage = layouts
    columns = {
        _RENAMED.get(name, name): load(field)
        for name, field in state.metrics._asdict().items()
        if name != "norm_seen"
    }
    columns["clip_rate"] = tuple(
        rate(c, a) for c, a in zip(columns["clipped"], columns["active"], strict=True)
    )
    whole: dict[str, Any] = {}
    rules = []
    for number, (layout, stage) in enumerate(zip(per_stage, state.stages, strict=True)):
        fields = getattr(stage.rule, "_asdict", dict)()
        rules.append((layout == WHOLE, tuple(fields)))
        for name, field in fields.items():
            if layout == WHOLE:
                whole[_free(name, number, whole)] = load(field)[0][0]
            elif layout == report:
                columns[_free(name, number, columns)] = load(field)
    return Reading(
        names=names,
        table=make_table(columns, has_vector=not all(report.axes)),
        whole=whole,
        norm_seen=_scalar(state.metrics.norm_seen),
        step=_scalar(state.clip_step),
        rules=tuple(rules),
    )


def _scalar(field: Any) -> Any:
    """The number in a field without axes, as NumPy's scalar where it is NumPy's.

    A framework may have wrapped it in a variable of its own, which goes on changing.
    """
    (value,) = load(field)
    return value[()] if isinstance(value, np.ndarray) else value


def _free(name: str, number: int, taken: dict[str, Any]) -> str:
    """The name of a rule's field; a later rule's is numbered if it has the same."""
    return f"{name}_{number}" if name in taken else name
