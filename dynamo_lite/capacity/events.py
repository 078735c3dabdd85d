"""What happens next: a heap of times."""

import heapq
import math
from collections.abc import Callable
from typing import Any


class Events:
    """Calls functions in the order of their times; those of one time in the order of `at`."""

    def __init__(self) -> None:
        #: Seconds from the start of the run.
        self.now = 0.0
        #: How many functions were called.
        self.done = 0
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

    def run(self, until: float = math.inf, most: int | None = None) -> bool:
        """Calls what is due up to `until`, at most `most` functions. Returns whether any is left
        to be called."""
        heap, pop = self._heap, heapq.heappop
        end = math.inf if most is None else self.done + most
        while heap and heap[0][0] <= until and self.done < end and not self._stopped:
            self.now, _, call, value = pop(heap)
            self.done += 1
            call(value)
        return bool(heap) and not self._stopped
