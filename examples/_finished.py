"""A finished run on disk: a command that goes on need not make it again.

What was made is the log; what is known of it besides is in a small file next to it.
"""

import json
from pathlib import Path
from typing import Any

from _analysis import Run
from _cli import BadOption
from _clippers import slug
from _config import Config
from _report import write_summary
from _same import Settings, check_same

_KEPT = (
    "rollbacks",
    "validation_loss",
    "compile_seconds",
    "ms_per_step",
    "batches_sha256",
    "stopped",
)


class Finished:
    """The place for one clipper's finished run."""

    def __init__(self, name: str, config: Config, settings: Settings):
        out = Path(config.out)
        self._name, self._settings = name, settings
        self._path = out / f"{slug(name)}.finished.json"
        self._log = out / f"{slug(name)}.jsonl"

    def check(self) -> None:
        """Raises BadOption if what is there is not this run."""
        self._read()

    def load(self) -> Run | None:
        """The run, if it is there."""
        saved = self._read()
        if saved is None:
            return None
        log = [json.loads(line) for line in self._log.read_text().splitlines()]
        rows = [row for row in log if not row.get("undone")]
        return Run(self._name, rows, log, **saved["run"])

    def save(self, run: Run) -> None:
        """Keeps what is not in the log."""
        kept = {key: getattr(run, key) for key in _KEPT}
        steps = len(run.log)
        write_summary(
            {"settings": self._settings, "lines": steps, "run": kept}, self._path
        )

    def forget(self) -> None:
        """Removes what a run that starts again makes untrue."""
        self._path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any] | None:
        if not self._path.exists():
            return None
        try:
            saved = json.loads(self._path.read_text())
            same_log = len(self._log.read_text().splitlines()) == saved["lines"]
            settings = saved["settings"]
        except (OSError, ValueError, KeyError, TypeError):
            same_log, saved, settings = False, None, {}
        if not same_log:
            raise BadOption(
                f"--resume: {self._path} and {self._log.name} do not belong together; "
                "remove the first to make that run again"
            )
        check_same(settings, self._settings, self._path)
        return saved
