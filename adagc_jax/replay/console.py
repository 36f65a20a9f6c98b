"""A terminal: rich where it is installed, plain text elsewhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from adagc_jax.replay.engine import Progress
from adagc_jax.replay.tables import Table, as_text


class Console:
    """Prints tables and text to stdout, progress to stderr."""

    def __init__(self, *, plain: bool = False):
        self.rich = None if plain else _rich_console()

    def text(self, text: str = "") -> None:
        """A line or paragraph."""
        if self.rich is None:
            print(text)
        else:
            self.rich.print(text, markup=False, highlight=False)

    def table(self, table: Table) -> None:
        """A table, and an empty line."""
        if self.rich is None or not table.rows:
            self.text(as_text(table))
        else:
            self.rich.print(_rich_table(table))
        self.text()

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Progress]:
        """A bar for ``total`` steps; yields what to call with the steps made."""
        if self.rich is not None and sys.stderr.isatty():
            yield from _rich_progress(what, total)
        else:
            yield _PlainProgress(what, total)


class _PlainProgress:
    """A bar of text in a terminal, a line every quarter elsewhere."""

    def __init__(self, what: str, total: int):
        self.what, self.total, self.done, self.said = what, total, 0, -1

    def __call__(self, steps: int) -> None:
        self.done += steps
        part = min(self.done / self.total, 1.0)
        live = sys.stderr.isatty()
        mark = int(part * (100 if live else 4))
        if mark == self.said:
            return
        self.said = mark
        bar = "#" * int(30 * part)
        text = f"{self.what} [{bar:<30}] {100 * part:3.0f} %"
        end = "\r" if live and part < 1.0 else "\n"
        print(text, end=end, file=sys.stderr, flush=True)


def _rich_console() -> Any:
    try:
        from rich.console import Console as RichConsole
    except ImportError:
        return None
    # In a file or pipe nobody folds lines back together.
    width = None if sys.stdout.isatty() else 160
    return RichConsole(width=width)


def _rich_table(table: Table) -> Any:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    # Names of tensors may look like markup: w[red].
    title = Text(table.title)
    drawn = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for number, column in enumerate(table.columns):
        drawn.add_column(Text(column), justify="right" if number else "left")
    for number, row in enumerate(table.rows):
        drawn.add_row(*map(Text, row), style="bold" if number == table.marked else None)
    return drawn


def _rich_progress(what: str, total: int) -> Iterator[Progress]:
    from rich.console import Console as RichConsole
    from rich.progress import (
        BarColumn,
        Progress as RichBar,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with RichBar(*columns, console=RichConsole(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda steps: bar.advance(task, steps)
