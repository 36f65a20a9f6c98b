"""Collectives of a compiled program: what is sent, and over which axes of the mesh."""

import re
from collections import Counter
from typing import NamedTuple

import numpy as np
from _hlo import COLLECTIVES, Instruction, Module, buffers


class Collective(NamedTuple):
    """One collective: what is sent, over which axes of the mesh.

    Attributes:
      kind: ``all-reduce``, ``all-gather`` ...
      operands: Number of arrays; XLA merges small collectives into one.
      bytes: Size of the operands on one device.
      axes: Names of the mesh axes along which the devices of a group differ.
    """

    kind: str
    operands: int
    bytes: int
    axes: tuple[str, ...]


def collectives(module: Module, mesh: dict[str, int]) -> list[Collective]:
    """All collectives of a program over a mesh with these axis sizes, in any order."""
    found = []
    for instructions in module.computations.values():
        types = {i.name: i.type for i in instructions}
        for instruction in instructions:
            kind = instruction.op.removesuffix("-start")
            if kind in COLLECTIVES:
                found.append(_collective(kind, instruction, types, mesh))
    return found


def added(
    collectives: list[Collective], baseline: list[Collective]
) -> list[Collective]:
    """The collectives that ``baseline`` does not have, as often as it lacks them."""
    return list((Counter(collectives) - Counter(baseline)).elements())


def _collective(
    kind: str, instruction: Instruction, types: dict[str, str], mesh: dict[str, int]
) -> Collective:
    sent = [b for name in instruction.operands for b in buffers(types[name])]
    groups = device_groups(instruction.attributes, int(np.prod(list(mesh.values()))))
    return Collective(kind, len(sent), sum(b.bytes for b in sent), _axes(groups, mesh))


def device_groups(attributes: str, devices: int) -> np.ndarray:
    """The groups of devices that talk to each other, one per row.

    XLA writes ``{{0,1},{2,3}}``, ``[2,2]<=[4]``, or the axes of a mesh of its own:
    ``mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}``.
    """
    listed = re.search(
        r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}", attributes
    )
    if listed:
        rows = [_ints(row) for row in re.findall(r"\{([\d,]+)\}", listed[1])]
        return np.array(rows or [range(devices)])
    counted = re.search(
        r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", attributes
    )
    if counted:
        return _iota(counted[2]).reshape(_ints(counted[1]))
    named = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^ ]*)\))? "
        r"\{((?:'\w+',?)*)\}",
        attributes,
    )
    if named:
        order = _iota(named[2]) if named[2] else np.arange(devices)
        return _mesh_groups(named[1], order, re.findall(r"\w+", named[3]))
    raise ValueError(f"unknown form of replica groups: {attributes[:200]!r}")


def _mesh_groups(mesh: str, order: np.ndarray, reduced: list[str]) -> np.ndarray:
    sizes = {axis: int(n) for axis, n in re.findall(r"'(\w+)'=(\d+)", mesh)}
    outer = [place for place, axis in enumerate(sizes) if axis not in reduced]
    inner = [place for place, axis in enumerate(sizes) if axis in reduced]
    grid = order.reshape(list(sizes.values())).transpose(outer + inner)
    return grid.reshape(-1, int(np.prod([sizes[axis] for axis in reduced])))


def _axes(groups: np.ndarray, mesh: dict[str, int]) -> tuple[str, ...]:
    places = np.unravel_index(groups, tuple(mesh.values()))
    return tuple(
        axis
        for axis, place in zip(mesh, places, strict=True)
        if np.any(place != place[:, :1])
    )


def _iota(text: str) -> np.ndarray:
    """``[64,8]T(1,0)``: counted through that shape, read transposed."""
    shape, _, order = text.strip("[])").partition("]T(")
    grid = np.arange(int(np.prod(_ints(shape)))).reshape(_ints(shape))
    return (grid.transpose(_ints(order)) if order else grid).reshape(-1)


def _ints(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]
