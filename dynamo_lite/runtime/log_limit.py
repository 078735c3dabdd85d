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

    def log(self, logger: logging.Logger, text: str, *args: object, exc_info: bool = False) -> None:
        """Logs the line unless it is suppressed, with the number of those before it. exc_info: with
        the exception that is handled, as an error."""
        if (now := _now()) < self._next:
            self._held_back += 1
            return
        more = f" ({self._held_back} similar lines were suppressed)" if self._held_back else ""
        self._next, self._held_back = now + self._every_s, 0
        level = logging.ERROR if exc_info else logging.WARNING
        logger.log(level, text + "%s", *args, more, exc_info=exc_info)


def _now() -> float:
    """Seconds by the running event loop's clock, which may be virtual."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()
