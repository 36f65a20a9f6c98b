"""Reads JSONL: one object a line, such as the JSONL logger of the examples writes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adagc_jax.replay.schema import Block, Schema
from adagc_jax.replay.text import RowCollector, open_text

_EXAMPLE = '{"step": 0, "clip/w/norm_before": 0.5}'


def jsonl_blocks(path: Path, schema: Schema) -> Iterator[Block]:
    """The blocks of a file; a last line that is cut off is left out."""
    collector = RowCollector(str(path), schema)
    template: _Template | None = None
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            where = f"line {number}"
            values = template.values(line) if template is not None else None
            if values is not None:
                yield from collector.add_values(where, values)
            elif line.strip():
                row = _parsed(path, number, line, schema)
                if row is not None:
                    yield from collector.add(where, row)
                    template = _Template(list(row), collector.keys)
    yield from collector.rest()


class _Template:
    """The keys of a row, for lines that have the same ones in the same order.

    Of these, only the numbers that matter are parsed: a log of everything holds many
    times more. Any other line has no values here and goes to the JSON parser.
    """

    def __init__(self, keys: list[str], wanted: tuple[str, ...]):
        self.keys = keys
        # Split at quotes, a line is: {, key, number, key, number, ...
        self.places = [2 * keys.index(key) + 2 for key in wanted]

    def values(self, line: str) -> tuple[float, ...] | None:
        parts = line.split('"')
        if parts[1::2] != self.keys or not line.endswith(("}\n", "}\r\n", "}")):
            return None
        try:
            return tuple(
                [float(parts[place].strip(":, }\r\n")) for place in self.places]
            )
        except ValueError:
            return None


def _parsed(
    path: Path, number: int, line: str, schema: Schema
) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        if not line.endswith("\n"):
            # The job was stopped, or is still running, in the middle of a line.
            schema.notes.append(f"the last line ({number}) is cut off: it is left out")
            return None
        raise ValueError(
            f"{path} line {number}: not JSON ({error.msg} at column {error.colno}); "
            f"expected one object a line, such as {_EXAMPLE}"
        ) from error
    if not isinstance(row, dict):
        raise ValueError(
            f"{path} line {number}: expected an object such as {_EXAMPLE}, got a "
            f"{type(row).__name__}."
        )
    return row
