"""Reads JSONL: one object a line, such as the JSONL logger of the examples writes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adagc_jax.replay.schema import STEP_KEYS, Block, Schema
from adagc_jax.replay.text import Lines, RowCollector

_EXAMPLE = '{"step": 0, "clip/w/norm_before": 0.5}'
_BARE = re.compile(r"(?<=[:\s])(-?)(nan|inf|infinity)(?=\s*[,}])", re.IGNORECASE)
_WORDS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")


def jsonl_blocks(path: Path, schema: Schema) -> Iterator[Block]:
    """The blocks of a file; lines that are cut off are left out."""
    collector = RowCollector(str(path), schema)
    template: _Template | None = None
    with Lines(path) as lines:
        for line in lines:
            where = f"line {lines.number}"
            values = template.values(line) if template is not None else None
            if values is not None:
                yield from collector.add_values(where, values)
            elif line.strip():
                row = _parsed(lines, line, schema)
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


def _parsed(lines: Lines, line: str, schema: Schema) -> dict[str, Any] | None:
    place = f"{lines.path} line {lines.number}"
    try:
        row = _loads(line)
    except json.JSONDecodeError as error:
        # The job was stopped, or is still running, in the middle of a line; after a
        # restart the next row may stand behind what there is of it.
        row = _glued(line)
        if row is None and not _is_cut(line.strip(), error):
            raise ValueError(
                f"{place}: not JSON ({error.msg} at column {error.colno}); expected "
                f"one object a line, such as {_EXAMPLE}{_hint(line)}"
            ) from error
        last = "the last line" if lines.cut_off else "line"
        number = f"({lines.number})" if lines.cut_off else f"{lines.number}"
        behind = "; the row behind it is read" if row is not None else ""
        schema.notes.append(f"{last} {number} is cut off: it is left out{behind}")
        return row
    if not isinstance(row, dict):
        raise ValueError(
            f"{place}: expected an object such as {_EXAMPLE}, got a "
            f"{type(row).__name__}{_hint(line)}."
        )
    return row


def _hint(line: str) -> str:
    array = line.lstrip().startswith("[")
    return " (of an array, jq -c '.[]' makes lines)" if array else ""


def _loads(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        # Not all writers spell what is no number as Python and JavaScript do.
        spelled = _BARE.sub(
            lambda m: m[1] + ("NaN" if m[2].lower() == "nan" else "Infinity"), line
        )
        if spelled == line:
            raise
        return json.loads(spelled)


def _is_cut(text: str, error: json.JSONDecodeError) -> bool:
    """Whether the text is the start of an object, and nothing else."""
    if not text.startswith("{"):
        return False
    rest = text[error.pos :] if error.pos < len(text) else ""
    return (
        error.msg.startswith("Unterminated string")
        or re.fullmatch(r"[-+.\deE]*", rest) is not None
        or any(word.startswith(rest) for word in _WORDS)
    )


def _glued(line: str) -> dict[str, Any] | None:
    """The row that stands behind one that is cut off, if it is whole."""
    if not line.startswith("{"):
        return None
    for start in re.finditer(r'(?<!^)\{"', line):
        try:
            row = _loads(line[start.start() :])
        except json.JSONDecodeError:
            continue
        return row if set(row) & set(STEP_KEYS) else None
    return None
