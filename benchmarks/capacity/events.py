"""What happens next: a heap of times."""

import heapq
from collections.abc import Callable
from typing import Any


class Events:
    """Calls functions in the order of their times; those of one time in the order of `at`."""

    def __init__(self) -> None:
        #: Seconds from the start of the run.
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._number = 0
        self._stopped = False

    def stop(self) -> None:
        """Nothing more is called."""
        self._stopped = True

    def at(self, when: float, call: Callable[[Any], None], value: Any = None) -> None:
        """`call(value)` at `when`, which must not be in the past."""
        self._number += 1
        heapq.heappush(self._heap, (when, self._number, call, value))

    def run(self) -> None:
        """Returns when nothing is left to be called."""
        heap, pop = self._heap, heapq.heappop
        while heap and not self._stopped:
            self.now, _, call, value = pop(heap)
            call(value)
