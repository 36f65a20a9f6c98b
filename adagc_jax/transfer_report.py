"""What `transfer_state` kept, made new and dropped, number by number."""

import dataclasses
from typing import NamedTuple

KEPT, NEW, DROPPED = "kept", "new", "dropped"
_SHOWN = 3


class Row(NamedTuple):
    """Some numbers of the new state, or of the old one if they were dropped.

    Attributes:
      status: ``"kept"``, ``"new"`` or ``"dropped"``.
      path: Where they are: ``0/stages/0/rule/gamma/layers/w``.
      part: The named tuple that they belong to, ``0/stages/0 EmaRatioState``.
      field: Its field.
      tensor: Path of the tensor; empty if they belong to none.
      origin: Where kept numbers were in the old state, a path.
      source: The named tuple that they belonged to there.
      why: Why numbers are new, and other remarks.
    """

    status: str
    path: str
    part: str
    field: str
    tensor: str
    origin: str = ""
    source: str = ""
    why: str = ""


@dataclasses.dataclass(frozen=True)
class TransferReport:
    """What became of every number of an old and a new optimizer state.

    ``print(report)`` shows it as a table with one line per part. Every path of the new
    state is in ``kept`` or in ``new``; every path of the old one was kept or is in
    ``dropped``.

    Attributes:
      rows: One `Row` per field and tensor.
    """

    rows: tuple[Row, ...]

    @property
    def kept(self) -> list[str]:
        """Paths in the new state whose numbers come from the old one."""
        return self._paths(KEPT)

    @property
    def new(self) -> list[str]:
        """Paths in the new state whose numbers are those of ``init``."""
        return self._paths(NEW)

    @property
    def dropped(self) -> list[str]:
        """Paths in the old state whose numbers are in no place of the new one."""
        return self._paths(DROPPED)

    def __str__(self) -> str:
        groups: dict[tuple[str, str, str], list[Row]] = {}
        for status in (KEPT, NEW, DROPPED):
            for row in self.rows:
                if row.status == status:
                    key = (status, row.part, _came_from(row))
                    groups.setdefault(key, []).append(row)
        lines = [("", "part", "arrays", "fields", "tensors", "from, or why")] + [
            (status, part, str(len(rows)), _fields(rows), _tensors(rows), from_or_why)
            for (status, part, from_or_why), rows in groups.items()
        ]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = [
            [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
            for line in lines
        ]
        return "\n".join("  ".join(cells).rstrip() for cells in padded)

    def _paths(self, status: str) -> list[str]:
        return [row.path for row in self.rows if row.status == status]


def _came_from(row: Row) -> str:
    source = "the same place" if row.source == row.part else row.source
    return "; ".join(filter(None, (source, row.why)))


def _fields(rows: list[Row]) -> str:
    return _shown([row.field for row in rows])


def _tensors(rows: list[Row]) -> str:
    return _shown([row.tensor for row in rows if row.tensor])


def _shown(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
