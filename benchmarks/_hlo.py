"""Reads compiled HLO text: instructions, HBM traffic.

    compiled.as_text() -> parse -> Module -> traffic / operations / cycles / collectives

Everything here is text processing: no JAX, no devices. What it does not know (a type, a
loop where bytes are counted) is an error, never a zero.
"""

import dataclasses
import re
from typing import NamedTuple

import numpy as np

BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2"), 1),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 8),
    "token": 0,
}
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# They name, group or reinterpret buffers without moving a byte.
FREE = {
    "parameter",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "constant",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
}
LOOPS = ("while", "conditional")
# The second hands work to another core of the chip, such as all-reduces of v7x.
CALLS = ("call", "call-start")


class Buffer(NamedTuple):
    """One array of a type: its size, and whether it lives in HBM."""

    bytes: int
    in_hbm: bool


class Instruction(NamedTuple):
    """One line of HLO."""

    name: str
    type: str
    op: str
    operands: tuple[str, ...]
    attributes: str


@dataclasses.dataclass(frozen=True)
class Module:
    """Instructions of every computation, in scheduled order."""

    computations: dict[str, list[Instruction]]
    entry: str


def parse(text: str) -> Module:
    """The module of ``compiled.as_text()``."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$", line)
        if header:
            current = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and " = " in line:
            current.append(_instruction(line))
    if not entry:
        raise ValueError(f"no ENTRY computation in HLO text of {len(text)} characters")
    return Module(computations, entry)


def buffers(type_text: str) -> list[Buffer]:
    """The arrays of a type such as ``(f32[8,128]{1,0:T(8,128)S(1)}, s32[])``."""
    found = re.findall(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?", type_text)
    for dtype, _, _ in found:
        if dtype not in BYTES:
            raise ValueError(f"unknown HLO dtype {dtype!r} in {type_text!r}")
    return [
        Buffer(
            BYTES[dtype] * int(np.prod([int(d) for d in dims.split(",") if d])),
            # Memory spaces above 0 are on the chip (VMEM, SMEM, semaphores).
            not re.search(r"S\([1-9]\d*\)", layout),
        )
        for dtype, dims, layout in found
    ]


def traffic(module: Module) -> int:
    """HBM bytes that one run moves: operands and results of each top-level operation.

    Buffers on the chip do not count, and a fusion's intermediates are never written.
    What XLA's ``cost_analysis`` calls bytes accessed counts on-chip memory as well.

    Raises:
      ValueError: for a program with loops, whose trip counts are not known here.
    """
    return sum(bytes_ for _, bytes_ in traffic_by_instruction(module, module.entry))


def traffic_by_instruction(
    module: Module, computation: str
) -> list[tuple[Instruction, int]]:
    """The HBM bytes that each instruction moves, those in called computations too."""
    instructions = module.computations[computation]
    types = {i.name: i.type for i in instructions}
    rows = []
    for instruction in instructions:
        if instruction.op in LOOPS:
            raise ValueError(
                f"{instruction.name} is a {instruction.op}: HBM traffic is counted for "
                "straight-line programs only, such as an optimizer step."
            )
        if instruction.op in CALLS:
            called = re.search(r"to_apply=%?([\w.\-]+)", instruction.attributes)
            assert called, instruction
            rows += traffic_by_instruction(module, called[1])
        elif not _is_free(instruction):
            rows.append((instruction, _moved(instruction, types)))
    return rows


def operations(module: Module) -> int:
    """Top-level operations that do something: roughly, kernels that are launched."""
    return sum(
        i.op not in FREE and not i.op.endswith("-done")
        for i in module.computations[module.entry]
    )


def cycles(module: Module) -> int | None:
    """Cycles that XLA for TPU expects one run to take; None where it names none."""
    found = [
        int(number)
        for instruction in module.computations[module.entry]
        for number in re.findall(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    ]
    return sum(found) if found else None


def _instruction(line: str) -> Instruction:
    name, body = line.strip().removeprefix("ROOT ").split(" = ", 1)
    end = _closing(body, 0) if body.startswith("(") else body.index(" ")
    type_text, rest = body[:end], body[end:].lstrip()
    op, _ = rest.split("(", 1)
    close = _closing(rest, len(op))
    operands = re.findall(r"%([\w.\-]+)", rest[len(op) : close])
    return Instruction(
        name.lstrip("%"), type_text, op, tuple(operands), rest[close:].lstrip(", ")
    )


def _closing(text: str, start: int) -> int:
    """Index after the parenthesis that closes the one at ``start``."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place + 1
    raise ValueError(f"unbalanced parentheses in {text!r}")


def _is_free(instruction: Instruction) -> bool:
    return (
        instruction.op in FREE
        or instruction.op.endswith("-done")
        or "ConcatBitcast" in instruction.attributes
    )


def _moved(instruction: Instruction, types: dict[str, str]) -> int:
    results = buffers(instruction.type)
    read = [b for name in instruction.operands for b in buffers(types[name])]
    if instruction.op == "copy-start":  # (destination, source, context)
        written = results[:1]
    elif instruction.op == "slice-start":  # (source, destination, context)
        # Only the slice is read, however large its source is.
        written = results[1:2]
        read = [Buffer(results[1].bytes, b.in_hbm) for b in read]
    elif instruction.op.removesuffix("-start") in COLLECTIVES:
        written = read
    elif instruction.op.endswith("-start"):
        raise ValueError(f"HBM traffic of {instruction.op} is not known")
    else:
        written = results
    return sum(b.bytes for b in (*read, *written) if b.in_hbm)
