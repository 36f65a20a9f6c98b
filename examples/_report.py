"""Progress while training, and the table, log and summary afterwards."""

import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from _analysis import Row, Run
from _loggers import Closing
from rich import box
from rich.console import Console, Group
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

_COUNTS = {
    "skipped": ("skipped", "steps that the guard refused"),
    "rollbacks": ("roll-\nbacks", "times that the run went back to a snapshot"),
}


def hardware() -> str:
    """What the milliseconds were measured on."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":")[1].strip() for line in lines if "model name" in line]
    model = models[0] if models else platform.processor() or platform.machine()
    return f"{os.cpu_count()} CPUs, {model}"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the numbers."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    found = {name: importlib.metadata.version(name) for name in packages}
    return {"python": platform.python_version(), **found}


def new_console() -> Console:
    """A console that does not squeeze the table into 80 columns in a log file."""
    console = Console()
    return console if console.is_terminal else Console(width=110)


class Live(Closing):
    """A progress bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, steps: int, lines: int = 6):
        self._console = console
        self._steps = steps
        self._every = max(1, steps // lines)
        self._said = 0
        self._task = TaskID(0)
        self._bar = Progress(
            TextColumn("{task.description:>12}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def open(self) -> None:
        self._bar.start()

    def close(self) -> None:
        self._bar.stop()

    def begin(self, name: str) -> None:
        """Opens the line of the next clipper."""
        self._said = 0
        self._task = self._bar.add_task(name, total=self._steps, numbers="compiling")

    def update(self, name: str, row: Row, seconds_per_step: float) -> None:
        """Shows the newest row of the log."""
        done = row["step"] + 1
        numbers = (
            f"loss {row['loss']:.3f}  norm {row['clip/norm_before']:.2f} → "
            f"{row['clip/norm_after']:.2f}  "
            f"clipped {100 * row['clip/fraction_clipped']:3.0f} %"
        )
        if "guard/skipped" in row:
            numbers += f"  skipped {row['guard/skipped']}"
        self._bar.update(self._task, completed=done, numbers=numbers)
        if not self._console.is_terminal and done - self._said >= self._every:
            self._said = done
            left = seconds_per_step * (self._steps - done)
            self._console.print(
                f"{name:>12} {done:5d}/{self._steps}  {numbers}  {left:.0f} s left"
            )

    def say(self, name: str, what: str) -> None:
        """Prints a line about a run."""
        self._console.print(f"{name:>12} {what}")

    def say_rollback(self, name: str, event: Mapping[str, Any]) -> None:
        """Prints what spiked, and where the run goes on."""
        first, last = event["skipped_batches"]
        self._console.print(
            f"{name:>12} loss {event['loss']:.3f} in step {event['spike']} spiked "
            f"(z {event['z']:.1f}): back to step {event['back_to']}, without batches "
            f"{first} to {last}",
            style="yellow",
        )


def _number(value: float | None, digits: int = 3) -> str:
    missing = value is None or not math.isfinite(value)
    return "-" if missing else f"{value:.{digits}f}"


def table(results: Mapping[str, Any], burst_names: Sequence[str]) -> Group:
    """One row per clipper, and what the columns mean."""
    # What was not asked for is None in every result, and has no column.
    counts = [
        key for key in _COUNTS if any(r[key] is not None for r in results.values())
    ]
    shown = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=bool(counts))
    shown.add_column("clipper", no_wrap=True)
    # One word per line keeps the table within 80 columns.
    headings = ["val\nloss", *("jump\n" + b.replace("@", "\n@") for b in burst_names)]
    headings += ["max\nz", "spike\nscore", "clip\n%"]
    headings += [*(_COUNTS[key][0] for key in counts), "ms per\nstep"]
    for heading in headings:
        shown.add_column(heading, justify="right")
    for name, result in results.items():
        shown.add_row(
            name,
            "stopped" if result["stopped"] else _number(result["validation_loss"]),
            *(_number(result["jumps"].get(burst), 2) for burst in burst_names),
            _number(result["max_z"], 1),
            _number(result["spike_score_percent"], 2),
            _number(100 * result["clip_rate"], 0),
            *(str(result[key]) for key in counts),
            _number(result["ms_per_step"], 0),
        )
    legend = (
        "jump: largest of the five losses after a burst less the mean of ten before\n"
        "max z, spike score (%): on clean steps; clip %: of all tensors and steps\n"
        f"ms per step: after compilation, on {hardware()}\n"
    )
    legend += "".join(f"{key}: {_COUNTS[key][1]}\n" for key in counts)
    return Group(shown, Text(legend, style="dim"))


def sizes_table(counts: Mapping[str, Mapping[str, int]]) -> Table:
    """Parameters of every preset, one row per size."""
    shown = Table(box=box.SIMPLE, pad_edge=False)
    shown.add_column("--size")
    for model in next(iter(counts.values())):
        shown.add_column(model, justify="right")
    for size, models in counts.items():
        shown.add_row(size, *(f"{count:,}" for count in models.values()))
    return shown


def _jsonable(value: Any) -> Any:
    """JSON has no NaN and no infinity, so they become null."""
    if isinstance(value, Mapping):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_line(row: Row) -> str:
    """One step's row as a line of JSON."""
    return json.dumps(_jsonable(row), allow_nan=False) + "\n"


def write_log(run: Run, path: Path) -> None:
    """Writes one JSON object per step; those that a rollback undid say so."""
    path.write_text("".join(map(as_line, run.log)))


def write_summary(summary: Mapping[str, Any], path: Path) -> None:
    """Writes settings, versions, hardware and results."""
    path.write_text(json.dumps(_jsonable(summary), indent=2, allow_nan=False) + "\n")
