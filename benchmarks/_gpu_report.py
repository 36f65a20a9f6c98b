"""What the check of an accelerator writes, while it runs and whatever fails.

measurements, each by itself -> Journal -> JSON on disk, a line on the screen
"""

import datetime
import importlib.metadata
import json
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import _stamp
import jax

Entry = dict[str, Any]
# What it is, and what measures it.
Pending = tuple[Entry, Callable[[], Entry]]

PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")
PACKAGES = ("jax", "jaxlib", *PLUGINS, "optax", "numpy")
LONGEST_MESSAGE = 2000


def attempted(measure: Callable[[], Entry]) -> Entry:
    """What was measured, or the error: others are still to be measured."""
    try:
        return measure()
    except Exception as error:  # whatever a kernel's compiler throws
        message = f"{type(error).__name__}: {error}"
        return {"error": message[:LONGEST_MESSAGE]}


class Journal:
    """The report so far, written again after every measurement."""

    def __init__(self, out: Path, seconds: float):
        self.out = out
        self.seconds = seconds
        self.started = time.perf_counter()
        self.longest: dict[Any, float] = {}
        self.report: dict[str, Any] = machine()

    def measure(self, part: str, pending: Iterable[Pending]) -> None:
        """Measures one after another, as long as the next one ends in time.

        It takes as long as the longest of its part and kind of tree did.
        """
        self.report[part] = []
        for entry, measure in pending:
            kind, begun = (part, entry.get("layers")), self._elapsed()
            if begun + self.longest.get(kind, 0.0) > self.seconds:
                found = {"left_out": "the time was over"}
            else:
                found = attempted(measure)
                took = self._elapsed() - begun
                self.longest[kind] = max(took, self.longest.get(kind, 0.0))
            self._add(part, entry | found)

    def failures(self) -> list[str]:
        """Everything that raised or was wrong, a line each."""
        parts = {k: v for k, v in self.report.items() if isinstance(v, list)}
        return [
            f"{part}: {what}"
            for part, entries in parts.items()
            for entry in entries
            for what in _failures(entry)
        ]

    def _add(self, part: str, entry: Entry) -> None:
        self.report[part].append(entry)
        self.report["seconds"] = round(self._elapsed(), 1)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(self.report, indent=1) + "\n")
        print(f"{self._elapsed():6.1f} s  {part}: {entry}", flush=True)

    def _elapsed(self) -> float:
        return time.perf_counter() - self.started


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    device = jax.devices()[0]
    return _stamp.measured(*filter(_is_installed, PACKAGES)) | {
        "devices": jax.device_count(),
        "driver": _driver(),
        "runtime": " ".join(device.client.platform_version.split()),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _failures(entry: Entry) -> list[str]:
    rows = entry.get("rows", {}).items()
    inside = [f"{name}: {row['error']}" for name, row in rows if "error" in row]
    if "error" in entry or not entry.get("right", True):
        return [str(entry)]
    where = {k: v for k, v in entry.items() if k != "rows"}
    return [f"{where}, {row}" for row in inside]


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(done.stdout.split()), "")


def _is_installed(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False
