"""Whether the queue on the broker is still the one that was seen before."""

import contextlib
import logging
from collections.abc import Callable, Generator, Hashable

logger = logging.getLogger(__name__)


class Incarnations:
    """Counts how often the broker was found with another queue than before."""

    def __init__(self) -> None:
        self.number = 0
        self._identity: Hashable = None
        self._callbacks: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"Incarnations({self.number}, {self._identity!r})"

    def seen(self, identity: Hashable) -> None:
        """identity: of the queue that the broker has; not None."""
        before, self._identity = self._identity, identity
        if before in (None, identity):
            return
        self.number += 1
        for callback in list(self._callbacks):
            try:
                callback()
            except Exception:
                logger.exception("a listener of the queue failed")

    @contextlib.contextmanager
    def watch(self, callback: Callable[[], None]) -> Generator[None]:
        """Calls back after each growth of `number` while the context lasts."""
        self._callbacks.append(callback)
        try:
            yield
        finally:
            self._callbacks.remove(callback)
