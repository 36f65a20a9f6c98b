"""Checkpoints of a run, and the log on disk that belongs to them.

A checkpoint has parameters, optimizer state, and how many lines of the log were
written before it. Going on from it cuts the log there: no step is missing, none is
there twice, and a run that was killed gives the same numbers as one that was not.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from _analysis import Row
from _report import as_line

# Settings that may differ from those of the run that is continued.
_FREE = ("out", "resume", "checkpoint_every", "log_every", "tensorboard", "wandb")


def fingerprint(config: Any) -> dict[str, Any]:
    """The settings that decide the numbers, as JSON gives them back."""
    settings = {
        key: value
        for key, value in dataclasses.asdict(config).items()
        if key not in _FREE
    }
    return json.loads(json.dumps(settings))


class StepLog:
    """One JSON object a line, on disk after every block of steps."""

    def __init__(self, path: Path, keep: int = 0):
        lines = path.read_text().splitlines(keepends=True) if keep else []
        if len(lines) < keep:
            raise ValueError(
                f"resume: {path} has {len(lines)} lines, its checkpoint was written "
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

    def __init__(self, folder: Path, every: int, settings: Mapping[str, Any]):
        self.folder, self._every, self._settings = folder.absolute(), every, settings
        self._opened: Any = None

    def start(self, resume: bool, tree: Any) -> tuple[Any, dict[str, Any]]:
        """The tree to start from and the notes saved with it, empty for a new run.

        Raises:
          ValueError: If there is a checkpoint that is not to be continued, or it was
            made with other settings.
        """
        if not self.folder.exists():
            return tree, {}
        if not resume:
            raise ValueError(
                f"{self.folder} has checkpoints of an earlier run: --resume goes on "
                "from them; to start again remove the folder or choose another --out"
            )
        manager, args = self._manager()
        step = manager.latest_step()
        if step is None:
            return tree, {}
        # Settings first: a tree of other sizes would not fit.
        only_notes = args.Composite(notes=args.JsonRestore())
        notes = manager.restore(step, args=only_notes)["notes"]
        self._check(notes["settings"])
        wanted = args.Composite(state=args.StandardRestore(_abstract(tree)))
        return manager.restore(step, args=wanted)["state"], notes

    def is_due(self, steps: range) -> bool:
        """Whether a multiple of `every` lies in these steps."""
        every = self._every
        return bool(every) and steps.stop // every > steps.start // every

    def save(self, step: int, tree: Any, **notes: Any) -> None:
        """Saves the state before `step`, with what else is needed to go on."""
        manager, args = self._manager()
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
            self._opened[0].close()

    def _check(self, saved: Mapping[str, Any]) -> None:
        changed = [
            f"{key} was {saved.get(key)!r} and is {value!r}"
            for key, value in self._settings.items()
            if saved.get(key) != value
        ]
        if changed:
            raise ValueError(f"resume: {'; '.join(changed)} in {self.folder}")

    def _manager(self) -> tuple[Any, Any]:
        if self._opened is None:
            try:
                import orbax.checkpoint as ocp
            except ImportError as error:
                raise ImportError(
                    "Checkpoints need orbax: pip install orbax-checkpoint."
                ) from error
            options = ocp.CheckpointManagerOptions(max_to_keep=2)
            manager = ocp.CheckpointManager(self.folder, options=options)
            self._opened = manager, ocp.args
        return self._opened


def _abstract(tree: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )
