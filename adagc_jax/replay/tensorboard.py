"""Reads TensorBoard event files, without TensorBoard or protobuf.

An event file is a row of records: length (u64), its checksum (u32), the data, its
checksum. Both are verified; only records far larger than scalars, such as images, are
spared the second, which would take long. The data is an ``Event`` message; of its
fields a scalar needs the step (2) and the summary (5), of the summary's values the tag
(1) and either ``simple_value`` (2) or a tensor (8) of one number: its kind (1) and
``tensor_content`` (4), ``float_val`` (5) or ``double_val`` (6).
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adagc_jax.replay.schema import Schema

_CHECKED = 1 << 16
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5


def event_files(path: Path) -> list[Path]:
    """The event files at a path, oldest first: itself, or those in the directory.

    Raises:
      ValueError: if there are none, naming the runs in the folders below.
    """
    if path.is_file():
        return [path]
    files = sorted(path.glob("*tfevents*"), key=_started)
    if not files:
        runs = sorted({str(file.parent) for file in path.glob("*/**/*tfevents*")})
        there = f"; there are some in {', '.join(runs[:5])}" if runs else ""
        raise ValueError(
            f"{path}: expected TensorBoard event files (*tfevents*) in the directory"
            f"{there}."
        )
    return files


def _started(file: Path) -> tuple[int, str]:
    """When a file was begun, in seconds: ``events.out.tfevents.<seconds>.<host>``."""
    seconds = file.name.partition("tfevents.")[2].split(".")[0]
    return int(seconds) if seconds.isdecimal() else 0, file.name


def event_rows(
    files: list[Path], schema: Schema
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of the scalars that follow each other with the same step."""
    row: dict[str, Any] = {}
    for file in files:
        for step, tag, value in _scalars(file, schema):
            if tag == "step":
                continue
            if row and (row["step"] != step or tag in row):
                yield f"step {row['step']}", row
                row = {}
            row.setdefault("step", step)
            row[tag] = value
    if row:
        yield f"step {row['step']}", row


def _scalars(path: Path, schema: Schema) -> Iterator[tuple[int, str, float]]:
    for number, data in enumerate(_records(path, schema), 1):
        try:
            yield from _scalars_of(data)
        except (ValueError, IndexError, struct.error) as error:
            raise ValueError(
                f"{path} record {number}: expected a TensorBoard event ({error})."
            ) from error


def _scalars_of(data: memoryview) -> list[tuple[int, str, float]]:
    step, summary = 0, None
    for field, kind, value in _fields(data):
        if field == 2 and kind == _VARINT:
            step = value
        elif field == 5 and kind == _BYTES:
            summary = value
    scalars = []
    for field, kind, value in _fields(summary) if summary is not None else ():
        if field == 1 and kind == _BYTES:
            scalar = _scalar(value)
            if scalar is not None:
                # A negative step is written as its two's complement.
                scalars.append((step - (step >> 63 << 64), *scalar))
    return scalars


def _records(path: Path, schema: Schema) -> Iterator[memoryview]:
    """The data of every record; a last one that is cut off is left out."""
    data = memoryview(path.read_bytes())
    at, number = 0, 1
    while at < len(data):
        length = _length(data, at, path, number) if at + 12 <= len(data) else 0
        start, end = at + 12, at + 12 + length
        if end + 4 > len(data):
            schema.notes.append(f"the last record of {path.name} is cut off")
            return
        (check,) = struct.unpack_from("<I", data, end)
        if length <= _CHECKED and _masked_crc(data[start:end]) != check:
            raise _damaged(path, number, at, "its checksum is wrong")
        yield data[start:end]
        at, number = end + 4, number + 1


def _length(data: memoryview, at: int, path: Path, number: int) -> int:
    length, check = struct.unpack_from("<QI", data, at)
    if _masked_crc(data[at : at + 8]) != check:
        raise _damaged(path, number, at, "the checksum of its length is wrong")
    return length


def _damaged(path: Path, number: int, at: int, why: str) -> ValueError:
    return ValueError(
        f"{path} record {number} (byte {at}): expected a TensorBoard event record, but "
        f"{why}: the file is damaged, or no event file."
    )


def _crc_table() -> list[int]:
    """CRC-32C (Castagnoli) of every byte."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC = _crc_table()


def _masked_crc(data: memoryview) -> int:
    """A checksum as event files hold it: rotated, and with a number added."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


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
                raise ValueError(f"unknown wire type {kind} at byte {at}")
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
