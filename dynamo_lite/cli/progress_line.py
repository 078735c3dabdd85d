"""A line on standard error that says how far a long command is."""

import sys
import time
from collections.abc import Callable

#: Seconds between two lines of a file, and between two texts of a terminal's line.
_LINE_S, _REWRITE_S = 10.0, 0.2


class ProgressLine:
    """A terminal's line is written over; anywhere else each text is a line."""

    def __init__(self) -> None:
        self._shown = time.monotonic()
        self._width = 0

    def show(self, text: Callable[[], str]) -> None:
        """Not too often: `text` is called only if something is shown now."""
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if now - self._shown < (_REWRITE_S if terminal else _LINE_S):
            return
        self._shown, line = now, text()
        if terminal:
            print(f"\r{line:<{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = len(line)
        else:
            print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Erases the line, so that other lines can be printed."""
        if self._width:
            print(f"\r{'':<{self._width}}\r", end="", file=sys.stderr, flush=True)
            self._width = 0
