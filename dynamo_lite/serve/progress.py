"""What the person who started a graph sees: one line per event, with seconds."""

import sys
import time


class Progress:
    """Lines on standard error; the result of the start is the only standard output."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def line(self, who: str, text: str) -> None:
        elapsed = time.monotonic() - self._began
        print(f"{elapsed:7.1f}s  {who:<16} {text}", file=sys.stderr, flush=True)


def exit_text(code: int) -> str:
    """How a process ended, from its return code."""
    return f"signal {-code}" if code < 0 else f"exit {code}"
