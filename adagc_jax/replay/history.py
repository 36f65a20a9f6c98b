"""What a run has logged, as arrays: the object between readers, rules and plots.

Readers make a `History`; a replay takes its norms and returns another one with the
scales and references that a rule would have had; plots draw either.
"""

import dataclasses
import zlib
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from jaxtyping import Float, Int

WHOLE_TREE = "whole tree"


@dataclasses.dataclass(frozen=True, eq=False)
class History:
    """Norms per tensor and update, and what else is known of these updates.

    Attributes:
      names: Of the tensors (or slices of stacked ones).
      steps: Logged step of every update, ascending.
      updates: Updates that the optimizer had made before each of these.
      norm: Incoming gradient norms; 0 where none was logged, which is to every rule
        a tensor without a gradient.
      total: Norm of the whole tree as the run's rule saw it; 0 where it is unknown
        and follows from ``norm``.
      scale: Factors on the gradients, NaN where unknown; None if there are none.
      reference: The rule's own norms, such as gamma, after each update, NaN where
        unknown; None if there are none.
      loss: NaN where unknown; None if there is none.
      notes: What a reader of the numbers should know: gaps, late tensors, restarts.
    """

    names: tuple[str, ...]
    steps: Int[np.ndarray, " time"]
    updates: Int[np.ndarray, " time"]
    norm: Float[np.ndarray, "time tensors"]
    total: Float[np.ndarray, " time"]
    scale: Float[np.ndarray, "time tensors"] | None = None
    reference: Float[np.ndarray, "time tensors"] | None = None
    loss: Float[np.ndarray, " time"] | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self):
        """Refuses arrays that do not belong together."""
        grid = (len(self.steps), len(self.names))
        for field, shape in (
            ("updates", grid[:1]),
            ("norm", grid),
            ("total", grid[:1]),
            ("scale", grid),
            ("reference", grid),
            ("loss", grid[:1]),
        ):
            value = getattr(self, field)
            if value is not None and np.shape(value) != shape:
                raise ValueError(
                    f"{field} has shape {np.shape(value)}, but {grid[0]} steps and "
                    f"{grid[1]} names ask for {shape}."
                )

    def replace(self, **changes: Any) -> "History":
        """A copy with other fields."""
        return dataclasses.replace(self, **changes)

    def index(self, name: str) -> int:
        """Column of a tensor.

        Raises:
          ValueError: for an unknown name, with the names that are close to it.
        """
        if name in self.names:
            return self.names.index(name)
        close = [n for n in self.names if name in n or n in name] or self.names
        shown = ", ".join(close[:5]) + (", ..." if len(close) > 5 else "")
        raise ValueError(
            f"name must be a logged tensor, got {name!r}; there are {shown}"
        )

    def rebased(self) -> "History":
        """The same history with its first update counted as the first of all."""
        return self.replace(updates=self.updates - self.updates[0])

    def whole(self) -> "History":
        """All tensors as one, whose norm is that of the whole tree.

        A norm over finite tensors only, which is what a warm-up works with, must not
        hide a NaN from a rule on the whole tree.
        """
        squares = np.square(self.norm, dtype=np.float64)
        with np.errstate(over="ignore"):
            own = np.sqrt(np.sum(squares, axis=1)).astype(np.float32)
        known = (self.total > 0) & np.isfinite(own)
        total = np.where(known, self.total, own)
        return self.replace(
            names=(WHOLE_TREE,),
            norm=total[:, None],
            total=total,
            scale=None,
            reference=None,
        )


def save_history(history: History, path: str | Path) -> Path:
    """Saves a history as ``.npz``, which is read in a fraction of a log's time.

    Args:
      history: What a reader returned.
      path: Where to; ``.npz`` is put behind a name without it.

    Returns:
      The path that was written.

    Raises:
      OSError: if it cannot be written.

    Example:
      >>> import tempfile, numpy as np
      >>> steps = np.arange(2)
      >>> history = History(("w",), steps, steps, np.ones((2, 1)), np.zeros(2))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     load_history(save_history(history, f"{folder}/norms")).names
      ('w',)
    """
    path = Path(path)
    if path.suffix != ".npz":
        path = path.with_name(f"{path.name}.npz")
    fields = {k: v for k, v in vars(history).items() if v is not None}
    fields |= {k: np.array(fields[k], dtype=str) for k in ("names", "notes")}
    np.savez(path, **fields)
    return path


def load_history(path: str | Path) -> History:
    """Reads what `save_history` wrote; `read_history` knows these files as well.

    Args:
      path: The ``.npz``.

    Returns:
      The `History` that was saved.

    Raises:
      ValueError: for a file with other arrays in it, or none.
      OSError: if it cannot be read.

    Example:
      >>> import tempfile, numpy as np
      >>> steps = np.arange(2)
      >>> history = History(("w",), steps, steps, np.ones((2, 1)), np.zeros(2))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     load_history(save_history(history, f"{folder}/norms.npz")).norm.shape
      (2, 1)
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            fields = dict(stored)
    except (ValueError, TypeError, EOFError, BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path}: expected the .npz of save_history, but it is cut off, damaged or "
            f"no such file."
        ) from error
    known = {field.name: field for field in dataclasses.fields(History)}
    needed = {"notes"} | {
        name for name, field in known.items() if field.default is dataclasses.MISSING
    }
    if not needed <= set(fields) <= set(known):
        raise ValueError(
            f"{path}: expected the arrays of save_history ({', '.join(known)}), got "
            f"{', '.join(sorted(fields)) or 'none'}."
        )
    texts = {k: tuple(map(str, fields.pop(k))) for k in ("names", "notes")}
    try:
        return History(**texts, **fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
