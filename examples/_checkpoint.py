"""Checkpoints of a run, and the log on disk that belongs to them.

A checkpoint has parameters, optimizer state, and how many lines of the log were
written before it. Going on from it cuts the log there: no step is missing, none is
there twice, and a run that was killed gives the same numbers as one that was not.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from _analysis import Row
from _cli import BadOption, check_installed
from _report import as_line
from _same import Settings, check_same


class StepLog:
    """One JSON object a line, on disk after every block of steps."""

    def __init__(self, path: Path, keep: int = 0):
        lines = []
        if keep and path.exists():
            lines = path.read_text().splitlines(keepends=True)
        if len(lines) < keep:
            raise BadOption(
                f"--resume: {path} has {len(lines)} lines, its checkpoint was written "
                f"after {keep}; remove the folder of checkpoints to start again"
            )
        self.rows: list[Row] = [json.loads(line) for line in lines[:keep]]
        self.lines = keep
        path.write_text("".join(lines[:keep]))
        self.path = path

    def add(self, rows: Sequence[Row]) -> None:
        """Appends a line per row."""
        with self.path.open("a") as file:
            file.writelines(map(as_line, rows))
        self.lines += len(rows)


class Checkpoints:
    """The checkpoints of one run, in a folder of their own, by orbax.

    Args:
      folder: Where they are.
      every: Steps between two of them; 0 for none but those that are asked for.
      settings: What must be the same when a run is continued.
    """

    def __init__(self, folder: Path, every: int, settings: Settings):
        self.folder, self._every, self._settings = folder.absolute(), every, settings
        self._opened: Any = None

    def notes(self, resume: bool) -> dict[str, Any]:
        """What was saved with the last checkpoint; empty for a new run.

        Raises:
          BadOption: If there is a checkpoint that is not to be continued, or cannot be
            read, or was made with other settings.
        """
        if not self.folder.is_dir() or not any(self.folder.iterdir()):
            return {}
        if not resume:
            raise BadOption(
                f"--out: {self.folder} has checkpoints of an earlier run. --resume "
                "goes on from them; to start again remove the folder or choose another"
            )
        notes = saved_notes(self._manager())
        if notes:
            check_same(notes["settings"], self._settings, self.folder)
        return notes

    def state(self, step: int, tree: Any) -> Any:
        """The tree of that step, with shapes and places of `tree`."""
        return _restored(self._manager(), step, state=_abstract(tree))

    def is_due(self, steps: range, end: int) -> bool:
        """Whether a multiple of `every` lies in these steps, or the run's end."""
        every = self._every
        passed = bool(every) and steps.stop // every > steps.start // every
        return passed or (bool(every) and steps.stop == end)

    def save(self, step: int, tree: Any, **notes: Any) -> None:
        """Saves the state before `step`, with what else is needed to go on."""
        import orbax.checkpoint as ocp

        manager, args = self._manager(), ocp.args
        if manager.latest_step() == step:
            return
        notes |= {"step": step, "settings": self._settings}
        saved = args.Composite(
            state=args.StandardSave(tree), notes=args.JsonSave(notes)
        )
        manager.save(step, args=saved)
        manager.wait_until_finished()

    def close(self) -> None:
        """Waits for what is being written."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _manager(self) -> Any:
        if self._opened is None:
            self._opened = open_folder(self.folder)
        return self._opened


def open_folder(folder: Path) -> Any:
    """Orbax's manager of the checkpoints in a folder.

    Raises:
      BadOption: If orbax is not installed.
    """
    check_installed("A checkpoint", "orbax.checkpoint", "orbax-checkpoint")
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    return ocp.CheckpointManager(folder.absolute(), options=options)


def saved_notes(manager: Any) -> dict[str, Any]:
    """The notes of the last checkpoint; empty if there is none."""
    step = manager.latest_step()
    return {} if step is None else _restored(manager, step, notes=None)


def _restored(manager: Any, step: int, **what: Any) -> Any:
    import orbax.checkpoint as ocp

    ((name, tree),) = what.items()
    wanted = ocp.args.JsonRestore() if tree is None else ocp.args.StandardRestore(tree)
    try:
        return manager.restore(step, args=ocp.args.Composite(**{name: wanted}))[name]
    except Exception as error:
        # Of what orbax says of a damaged file, the kind differs with its version.
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise BadOption(
            f"--resume: the checkpoint {manager.directory}/{step} cannot be read "
            f"({reason:.200}). Remove it to go on from the one before, or all of "
            f"{manager.directory} to start again"
        ) from error


def _abstract(tree: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )
