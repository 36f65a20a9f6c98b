"""Reads TensorBoard event files, without TensorBoard or protobuf.

An event file is a row of records: length (u64), its checksum (u32), the data, its
checksum. The data is an ``Event`` message; of its fields a scalar needs the step (2)
and the summary (5), of the summary's values the tag (1) and either ``simple_value`` (2)
or a tensor (8) of one number: its kind (1) and ``tensor_content`` (4), ``float_val``
(5) or ``double_val`` (6).
"""

import array
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from adagc_jax.replay.schema import Block, Schema

_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5


def event_files(path: Path) -> list[Path]:
    """The event files at a path, oldest first: itself, or those in the directory.

    Raises:
      ValueError: if there are none, naming the runs in the folders below.
    """
    if path.is_file():
        return [path]
    files = sorted(path.glob("*tfevents*"))
    if not files:
        runs = sorted({str(file.parent) for file in path.glob("*/**/*tfevents*")})
        there = f"; there are some in {', '.join(runs[:5])}" if runs else ""
        raise ValueError(
            f"{path}: expected TensorBoard event files (*tfevents*) in the directory"
            f"{there}."
        )
    return files


def event_block(files: list[Path], schema: Schema) -> Block:
    """All scalars of the files on one grid of steps and tags."""
    series: dict[str, tuple[array.array, array.array]] = {}
    for file in files:
        for step, tag, value in _scalars(file, schema):
            if tag not in series:
                series[tag] = (array.array("q"), array.array("d"))
            series[tag][0].append(step)
            series[tag][1].append(value)
    steps = np.unique(np.concatenate([np.array(s) for s, _ in series.values()] or [[]]))
    keys = ("step", *(tag for tag in series if tag != "step"))
    values = np.full((len(steps), len(keys)), np.nan)
    present = np.zeros(values.shape, bool)
    values[:, 0], present[:, 0] = steps, True
    for column, tag in enumerate(keys[1:], 1):
        rows = np.searchsorted(steps, np.array(series[tag][0]))
        # Assignment keeps the last of several values: that of a later restart.
        values[rows, column], present[rows, column] = series[tag][1], True
    return Block([f"step {step}" for step in steps], keys, values, present)


def _scalars(path: Path, schema: Schema) -> Iterator[tuple[int, str, float]]:
    for data in _records(path, schema):
        step, summary = 0, None
        for field, kind, value in _fields(data):
            if field == 2 and kind == _VARINT:
                step = value
            elif field == 5 and kind == _BYTES:
                summary = value
        if summary is not None:
            for field, kind, value in _fields(summary):
                if field == 1 and kind == _BYTES:
                    scalar = _scalar(value)
                    if scalar is not None:
                        yield step, *scalar


def _records(path: Path, schema: Schema) -> Iterator[memoryview]:
    """The data of every record; a last one that is cut off is left out."""
    data = memoryview(path.read_bytes())
    at, number = 0, 1
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        end = at + 12 + length
        if end + 4 > len(data):
            if number == 1 or length > 1 << 30:
                raise ValueError(
                    f"{path} record {number} (byte {at}): expected a TensorBoard event "
                    f"record, got a length of {length} bytes."
                )
            schema.notes.append(f"the last record of {path.name} is cut off")
            return
        yield data[at + 12 : end]
        at, number = end + 4, number + 1


def _scalar(data: memoryview) -> tuple[str, float] | None:
    tag, number = "", None
    for field, kind, value in _fields(data):
        if field == 1 and kind == _BYTES:
            tag = str(value, "utf-8")
        elif field == 2 and kind == _FLOAT:
            (number,) = struct.unpack("<f", value)
        elif field == 8 and kind == _BYTES:
            number = _tensor(value)
    return None if number is None else (tag, number)


def _tensor(data: memoryview) -> float | None:
    """The number of a float tensor that holds only one; others are no scalars."""
    kind_of_number, content = 1, b""
    for field, kind, value in _fields(data):
        if field == 1 and kind == _VARINT:
            kind_of_number = value
        elif field in (4, 5, 6) and kind != _VARINT:
            content = value
    layout = {1: "<f", 2: "<d"}.get(kind_of_number)
    if layout is None or len(content) != struct.calcsize(layout):
        return None
    return struct.unpack(layout, content)[0]


def _fields(data: memoryview) -> Iterator[tuple[int, int, Any]]:
    """Number, wire type and value of the fields of a protobuf message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
        else:
            if kind == _BYTES:
                size, at = _varint(data, at)
            elif kind in (_DOUBLE, _FLOAT):
                size = 8 if kind == _DOUBLE else 4
            else:
                raise ValueError(
                    f"event record: unknown wire type {kind} at byte {at}."
                )
            value, at = data[at : at + size], at + size
        yield key >> 3, kind, value


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
