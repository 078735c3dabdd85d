"""Progress of `dynamo-lite serve` on the terminal: one line per event, with seconds."""

import sys
import time


class Progress:
    """Prints lines to standard error; only the result of the start goes to standard output."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def line(self, name: str, text: str) -> None:
        elapsed = time.monotonic() - self._began
        print(f"{elapsed:7.1f}s  {name:<16} {text}", file=sys.stderr, flush=True)


def exit_text(code: int) -> str:
    """A process's return code in words; negative: the number of the signal that ended it."""
    return f"signal {-code}" if code < 0 else f"exit {code}"
