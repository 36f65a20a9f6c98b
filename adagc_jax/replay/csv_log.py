"""Reads CSV: a column for every key, or long form; and chart exports."""

import csv
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from adagc_jax.replay.schema import NORM, STEP_KEYS, Block, Schema
from adagc_jax.replay.text import ROWS, Lines, block_of_rows, blocks_of_rows

_LONG_NAMES = ("name", "tensor", "key", "metric")
_LONG_NORMS = ("norm", "norm_before", "value")
_EXPECTED = "expected a header such as step,clip/w/norm_before or step,name,norm"


def csv_blocks(path: Path, schema: Schema, run: str | None) -> Iterator[Block]:
    """A column for every key, or long form: ``step,name,norm``; with a header.

    Cells may be separated by commas, semicolons or tabs. In a chart export of Weights &
    Biases the columns are called ``run - key``.
    """
    header = _header(path)
    long = _long_columns(header)
    if long is None:
        yield from _wide(path, _run_columns(path, header, run), schema)
        return
    if run is not None:
        raise _no_runs(path)
    keys = _keys_of_names(path, long[1], schema)
    yield from blocks_of_rows(str(path), _pivoted(path, long, keys, schema), schema)


def _header(path: Path) -> list[str]:
    header = next((cells for _, cells in _Table(path)), [])
    if not header:
        raise ValueError(f"{path} line 1: {_EXPECTED}; the file is empty.")
    if all(_is_number(cell) for cell in header):
        raise ValueError(f"{path} line 1: {_EXPECTED}, got numbers.")
    return header


class _Table:
    """The records of a file with the line each starts at, and whether one is cut."""

    def __init__(self, path: Path):
        self.path = path
        self.lines: Lines | None = None

    @property
    def cut_off(self) -> bool:
        return self.lines is not None and self.lines.cut_off

    def __iter__(self) -> Iterator[tuple[int, list[str]]]:
        separator, start = _separator(self.path), 1
        with Lines(self.path) as self.lines:
            reader = csv.reader(self.lines, delimiter=separator, strict=True)
            while True:
                start = reader.line_num + 1
                try:
                    cells = next(reader, None)
                except csv.Error as error:
                    raise ValueError(
                        f"{self.path} line {start}: not CSV ({error}); is a quote "
                        "opened there and never closed?"
                    ) from error
                if cells is None:
                    return
                if cells:
                    yield start, cells


def _separator(path: Path) -> str:
    """The one that cuts the header into the most cells."""
    with Lines(path) as lines:
        header = next(lines, "")
    return max(",;\t", key=header.count)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _long_columns(header: list[str]) -> tuple[int, int, int] | None:
    """Positions of step, name and norm, if the table is in long form."""
    lower = [column.strip().lower() for column in header]

    def position(names: Sequence[str]) -> int | None:
        return next((lower.index(name) for name in names if name in lower), None)

    found = position(STEP_KEYS), position(_LONG_NAMES), position(_LONG_NORMS)
    return None if None in found else found  # pyright: ignore[reportReturnType]


def _keys_of_names(path: Path, column: int, schema: Schema) -> dict[str, str]:
    """Names are keys where some are keys of norms, and else names of tensors."""
    rows = islice(_Table(path), 1, None)
    names = {cells[column].strip(): None for _, cells in rows if len(cells) > column}
    if schema.pattern or any(name.endswith(NORM) for name in names):
        return {name: name for name in names}
    prefix = schema.prefix or "clip"
    return {
        name: name if name in schema.losses else f"{prefix}/{name}{NORM}"
        for name in names
    }


def _pivoted(
    path: Path, columns: tuple[int, int, int], keys: dict[str, str], schema: Schema
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Consecutive lines of the same step, with different keys, as one row."""
    row: dict[str, Any] = {}
    start, table = 2, _Table(path)
    for number, cells in islice(table, 1, None):
        if len(cells) <= max(columns):
            if table.cut_off:
                schema.notes.append(f"the last line ({number}) is cut off: left out")
                break
            raise ValueError(
                f"{path} line {number}: expected {max(columns) + 1} cells or more, got "
                f"{len(cells)}: {','.join(cells)[:80]!r}."
            )
        step, name, norm = (cells[column].strip() for column in columns)
        if row and (row["step"] != (step or None) or keys[name] in row):
            yield f"line {start}", row
            row = {}
        if not row:
            start, row = number, {"step": step or None}
        row[keys[name]] = norm or None
    if row:
        yield f"line {start}", row


def _no_runs(path: Path) -> ValueError:
    return ValueError(
        f"{path}: run= chooses a run of a chart export, whose columns are called "
        "'run - key'; there are none here: leave it out."
    )


def _run_columns(path: Path, header: list[str], run: str | None) -> list[str]:
    """Keys of the columns; empty for those of no interest."""
    runs = {c.split(" - ", 1)[0] for c in header if " - " in c}
    if run is not None and not runs:
        raise _no_runs(path)
    if len(runs) > 1 and run is None:
        raise ValueError(
            f"{path} line 1: columns of several runs ({', '.join(sorted(runs)[:5])}): "
            f"choose one with run={min(runs)!r}."
        )
    if run is not None and run not in runs:
        raise ValueError(
            f"{path} line 1: run must be one of {', '.join(sorted(runs)[:5])}, got "
            f"{run!r}."
        )

    def key(column: str) -> str:
        owner, separator, name = column.partition(" - ")
        if not separator:
            return column.strip()
        wanted = run is None or owner == run
        return name if wanted and not name.endswith(("__MIN", "__MAX")) else ""

    return [key(column) for column in header]


def _wide(path: Path, header: list[str], schema: Schema) -> Iterator[Block]:
    keys = tuple(schema.places(key for key in header if key))
    columns = [header.index(key) for key in keys]
    batch: list[list[str]] = []
    where: list[str] = []
    table = _Table(path)
    for number, cells in islice(table, 1, None):
        if len(cells) != len(header):
            if table.cut_off and len(cells) < len(header):
                schema.notes.append(f"the last line ({number}) is cut off: left out")
                break
            raise ValueError(
                f"{path} line {number}: expected {len(header)} cells as in the header, "
                f"got {len(cells)}."
            )
        batch.append(cells)
        where.append(f"line {number}")
        if len(batch) == ROWS:
            yield _block_of_cells(path, where, keys, columns, batch)
            batch, where = [], []
    if batch:
        yield _block_of_cells(path, where, keys, columns, batch)


def _block_of_cells(
    path: Path,
    where: Sequence[str],
    keys: tuple[str, ...],
    columns: list[int],
    batch: list[list[str]],
) -> Block:
    cells = [[row[column].strip() or None for column in columns] for row in batch]
    return block_of_rows(str(path), where, keys, [tuple(row) for row in cells])
