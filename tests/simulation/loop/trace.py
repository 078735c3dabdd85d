"""What happened in a simulation, line by line, and one number for all of it."""

import hashlib
import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.simulation.loop.scheduler import START_S

if TYPE_CHECKING:
    from tests.simulation.loop.loop import VirtualLoop


class Trace:
    """Lines of (loop time, process, text); costs one comparison while it is off.

    Text must not contain anything that differs between equal runs: addresses of objects, pids.
    keep: how many of the newest lines are kept; `digest` is over all of them.
    """

    def __init__(self, *, on: bool = False, keep: int | None = None):
        self.on = on
        self.loop: VirtualLoop | None = None
        self.lines: deque[tuple[float, str, str]] = deque(maxlen=keep)
        self._digest = hashlib.blake2b(digest_size=8)

    def add(self, text: str, process: str | None = None) -> None:
        """process: the name in the line; that of the running process if None."""
        if not self.on or self.loop is None:
            return
        name = process or str(self.loop.current_process())
        line = (self.loop.time(), name, text)
        self.lines.append(line)
        self._digest.update(repr(line).encode())

    def digest(self) -> str:
        return self._digest.hexdigest()

    def text(self) -> Iterator[str]:
        """Lines to read: seconds since the start, process, text."""
        for when_s, process, text in self.lines:
            yield f"{when_s - START_S:11.6f}  {process:<14} {text}"


class _Tap(logging.Handler):
    def __init__(self, trace: Trace):
        super().__init__()
        self._trace = trace

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f" [{record.exc_info[1]!r}]"
        self._trace.add(f"{record.levelname}: {text}")


@contextmanager
def log_to(trace: Trace, level: int = logging.DEBUG) -> Iterator[None]:
    """dynamo_lite's log lines go to `trace` alone, and nowhere while it is off."""
    root = logging.getLogger("dynamo_lite")
    before = (root.handlers[:], root.level, root.propagate, root.manager.disable)
    if trace.on:
        root.handlers[:] = [_Tap(trace)]
        root.setLevel(level)
        root.propagate = False
    else:
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        root.handlers[:], root.propagate = before[0], before[2]
        root.setLevel(before[1])
        logging.disable(before[3])
