"""Rate limit for log lines, so that one bad peer cannot fill the log."""

import asyncio
import logging
import time


class LogLimit:
    """Lets one line through per `every_s` seconds and counts the rest."""

    def __init__(self, every_s: float = 5.0):
        self._every_s = every_s
        self._next = float("-inf")
        self._held_back = 0

    def allow(self) -> int | None:
        """Returns None to suppress this line, else how many lines were suppressed before it."""
        now = _now()
        if now < self._next:
            self._held_back += 1
            return None
        self._next = now + self._every_s
        held_back, self._held_back = self._held_back, 0
        return held_back

    def log(
        self, logger: logging.Logger, text: str, *args: object, level: int = logging.WARNING
    ) -> None:
        """Logs the line unless it is suppressed, with the number of those before it."""
        if (held_back := self.allow()) is not None:
            more = f" ({held_back} similar lines were suppressed)" if held_back else ""
            logger.log(level, text + "%s", *args, more)


def _now() -> float:
    """Seconds by the running event loop's clock, which may be virtual."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()
