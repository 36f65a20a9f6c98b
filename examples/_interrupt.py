"""Ctrl-C as a wish: the block of steps is finished, and a checkpoint written."""

import signal
from types import FrameType
from typing import Any

from _loggers import Closing


class Interrupted(Exception):
    """The run was stopped by Ctrl-C, after a checkpoint."""


class Interrupt(Closing):
    """Notes the first Ctrl-C in a `with` block; the second one stops at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def open(self) -> None:
        self._before = signal.signal(signal.SIGINT, self._note)

    def close(self) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.asked = True
        signal.signal(signal.SIGINT, self._before)
