"""Reads CSV: a column for every key, or long form; and chart exports."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from adagc_jax.replay.schema import NORM, STEP_KEYS, Block, Schema
from adagc_jax.replay.text import ROWS, block_of_rows, blocks_of_rows, open_text

_LONG_NAMES = ("name", "tensor", "key", "metric")
_LONG_NORMS = ("norm", "norm_before", "value")


def csv_blocks(path: Path, schema: Schema, run: str | None) -> Iterator[Block]:
    """A column for every key, or long form: ``step,name,norm``; with a header.

    In a chart export of Weights & Biases the columns are called ``run - key``.
    """
    with open_text(path) as file:
        lines = csv.reader(file)
        header = next(lines, None)
        if not header:
            raise ValueError(
                f"{path} line 1: expected a header such as step,clip/w/norm_before or "
                "step,name,norm; the file is empty."
            )
        long = _long_columns(header)
        if long:
            rows = _pivoted(path, lines, long, schema)
            yield from blocks_of_rows(str(path), rows, schema)
        else:
            yield from _wide(path, lines, _run_columns(path, header, run), schema)


def _long_columns(header: list[str]) -> tuple[int, int, int] | None:
    """Positions of step, name and norm, if the table is in long form."""
    lower = [column.strip().lower() for column in header]

    def position(names: Sequence[str]) -> int | None:
        return next((lower.index(name) for name in names if name in lower), None)

    found = position(STEP_KEYS), position(_LONG_NAMES), position(_LONG_NORMS)
    return None if None in found else found  # pyright: ignore[reportReturnType]


def _pivoted(
    path: Path,
    lines: Iterable[list[str]],
    columns: tuple[int, int, int],
    schema: Schema,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Consecutive lines of the same step as one row."""
    row: dict[str, Any] = {}
    start = 2
    for number, cells in enumerate(lines, 2):
        if not cells:
            continue
        if len(cells) <= max(columns):
            raise ValueError(
                f"{path} line {number}: expected {max(columns) + 1} cells or more, got "
                f"{len(cells)}: {','.join(cells)!r}."
            )
        step, name, norm = (cells[column] for column in columns)
        key = name if schema.pattern or name.endswith(NORM) else f"clip/{name}{NORM}"
        if row and row["step"] != step:
            yield f"line {start}", row
            row = {}
        if not row:
            start, row = number, {"step": step}
        row[key] = norm if norm.strip() else None
    if row:
        yield f"line {start}", row


def _run_columns(path: Path, header: list[str], run: str | None) -> list[str]:
    """Keys of the columns; empty for those of no interest."""
    runs = {c.split(" - ", 1)[0] for c in header if " - " in c}
    if len(runs) > 1 and run is None:
        raise ValueError(
            f"{path} line 1: columns of several runs ({', '.join(sorted(runs)[:5])}): "
            "choose one with run=."
        )
    if run is not None and runs and run not in runs:
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


def _wide(
    path: Path, lines: Iterable[list[str]], header: list[str], schema: Schema
) -> Iterator[Block]:
    keys = tuple(schema.places(key for key in header if key))
    columns = [header.index(key) for key in keys]
    batch: list[list[str]] = []
    where: list[str] = []
    for number, cells in enumerate(lines, 2):
        if not cells:
            continue
        if len(cells) != len(header):
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
