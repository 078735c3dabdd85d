"""Detection of a queue that the broker has lost and created again."""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager

from dynamo_lite.runtime.listeners import Listeners


class Incarnations:
    """Counts how often the broker had another queue than at the check before."""

    def __init__(self) -> None:
        self.number = 0
        #: Identity of the queue that the broker had at the last check; None before the first
        #: check.
        self.identity: Hashable = None
        self._listeners = Listeners[[]]("the queue")

    def __repr__(self) -> str:
        return f"Incarnations({self.number}, {self.identity!r})"

    def seen(self, identity: Hashable) -> None:
        """identity: identifies the queue that the broker has now; not None."""
        before, self.identity = self.identity, identity
        if before in (None, identity):
            return
        self.number += 1
        self._listeners.notify()

    def watch(self, callback: Callable[[], None]) -> AbstractContextManager[None]:
        """Calls `callback` after each increase of `number` while the context lasts."""
        return self._listeners.add(callback)
