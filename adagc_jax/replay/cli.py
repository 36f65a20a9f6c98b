"""``adagc-replay``: what another clipper would have done, from a shell.

adagc-replay norms.jsonl --rule adagc --lambda-rel 1.1 --grid --out replay --html
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from adagc_jax.replay.arguments import (
    axes,
    hyper_parameters,
    in_shell_words,
    measure,
    parse,
)
from adagc_jax.replay.console import Console
from adagc_jax.replay.engine import replay
from adagc_jax.replay.history import History, save_history
from adagc_jax.replay.readers import read_history
from adagc_jax.replay.report import Report, write
from adagc_jax.replay.summary import describe, make_report
from adagc_jax.replay.variants import Variant, make_grid, make_variant
from adagc_jax.replay.whatif import what_if
from adagc_jax.replay.words import number_of

_PIPE_CLOSED = 141  # as a shell reports a process that SIGPIPE has ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 2 for what the user can put right."""
    if "JAX_PLATFORMS" not in os.environ:
        # Norms are few: an accelerator would only be slow to start, or be in use.
        jax.config.update("jax_platforms", "cpu")
    options = parse(arguments)
    try:
        _run(options, Console(plain=options.plain))
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads has seen enough, such as head; nothing is left to flush to.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return _PIPE_CLOSED
    except (ValueError, OSError, ImportError) as error:
        print(f"adagc-replay: {in_shell_words(str(error))}", file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace, console: Console) -> None:
    variants = _variants(options)
    spikes = measure(options)
    folder = Path(options.out or "replay") if options.out or options.html else None
    _check_output(folder, options.save)
    history = _read(options, console)
    rows = len(history.steps)
    with console.progress(
        number_of(len(variants), "setting"), rows * len(variants)
    ) as tick:
        result = what_if(
            history,
            variants,
            measure=spikes,
            nonfinite=options.nonfinite,
            progress=tick,
        )
    base = variants[0]
    with console.progress(str(base), rows) as tick:
        replayed = replay(history, base, nonfinite=options.nonfinite, progress=tick)
    report = make_report(Path(options.log).name, history, result, replayed)
    _show(report, console)
    if folder is not None:
        for path in write(report, folder, page=options.html):
            console.text(f"Wrote {path}")


def _variants(options: argparse.Namespace) -> list[Variant]:
    """The setting asked for, then those of the grid."""
    base = make_variant(options.rule, **hyper_parameters(options))
    if options.grid is None:
        return [base]
    same = (base.method, base.values)
    others = make_grid(base, axes(options))
    return [base, *(v for v in others if (v.method, v.values) != same)]


def _check_output(folder: Path | None, save: str | None) -> None:
    """Refuses what cannot be written, before anything is computed."""
    if folder is not None:
        try:
            import matplotlib.figure  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "--out and --html need matplotlib: pip install 'adagc-jax[plots]'."
            ) from error
        _check_folder("--out", folder, make=True)
    if save is not None:
        if Path(save).is_dir():
            raise ValueError(
                f"--save {save}: expected the name of a file, not a folder"
            )
        _check_folder("--save", Path(save).parent, make=False)


def _check_folder(option: str, folder: Path, *, make: bool) -> None:
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"{option} {folder}: cannot write there ({error.strerror})."
        ) from error


def _read(options: argparse.Namespace, console: Console) -> History:
    start = time.perf_counter()
    console.text(f"Reading {options.log} ...")
    history = read_history(
        options.log,
        prefix=options.prefix,
        pattern=options.pattern,
        loss=options.loss,
        run=options.run,
    )
    history = history.rebased() if options.rebase else history
    console.text(f"{describe(history)}, in {time.perf_counter() - start:.1f} s.")
    for note in history.notes:
        console.text(f"Note: {in_shell_words(note)}.")
    if options.save:
        console.text(f"Saved as {save_history(history, options.save)}.")
    return history


def _show(report: Report, console: Console) -> None:
    console.text()
    for table in report.tables:
        console.table(table)
    for line in report.lines[1:]:
        console.text(line)
