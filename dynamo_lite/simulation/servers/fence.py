"""A fence without a file: both ends are in one process."""

from collections.abc import Callable


class MemoryFence:
    """Implements Fence, and is read by `open`. now: a clock in seconds, as `boottime`."""

    def __init__(self, now: Callable[[], float]):
        self._now = now
        self._deadline = 0.0

    def extend(self, remaining_s: float) -> None:
        self._deadline = self._now() + remaining_s if remaining_s > 0 else 0.0

    def open(self) -> bool:
        return self._now() < self._deadline

    def close(self) -> None:
        self._deadline = 0.0
