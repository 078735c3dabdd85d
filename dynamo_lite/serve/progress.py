"""Progress of `dynamo-lite serve` on the terminal: one line per event, with seconds."""

import os
import sys
import time
from typing import TextIO


class Progress:
    """Prints lines to standard error; only the result of the start goes to standard output."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def line(self, name: str, text: str) -> None:
        elapsed = time.monotonic() - self._began
        say(f"{elapsed:7.1f}s  {name:<16} {text}", sys.stderr)


def say(text: str, stream: TextIO) -> None:
    """Prints a line. If it can be read no more (a closed terminal, or the end of a pipe), all
    further output of the stream is dropped: the processes of a graph go on, or drain in order."""
    try:
        print(text, file=stream, flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        # What is in the stream's buffer must have a place to go, or Python would exit with 120.
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def exit_text(code: int) -> str:
    """A process's return code in words; negative: the number of the signal that ended it."""
    return f"signal {-code}" if code < 0 else f"exit {code}"
