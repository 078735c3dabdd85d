"""Whether the queue on the broker is still the one that was seen before."""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager

from dynamo_lite.runtime.listeners import Listeners


class Incarnations:
    """Counts how often the broker was found with another queue than before."""

    def __init__(self) -> None:
        self.number = 0
        self._identity: Hashable = None
        self._listeners = Listeners[[]]("the queue")

    def __repr__(self) -> str:
        return f"Incarnations({self.number}, {self._identity!r})"

    def seen(self, identity: Hashable) -> None:
        """identity: of the queue that the broker has; not None."""
        before, self._identity = self._identity, identity
        if before in (None, identity):
            return
        self.number += 1
        self._listeners.notify()

    def watch(self, callback: Callable[[], None]) -> AbstractContextManager[None]:
        """Calls back after each growth of `number` while the context lasts."""
        return self._listeners.add(callback)
