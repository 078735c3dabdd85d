"""A fence without a file: both ends are in one process."""

from collections.abc import Callable

from dynamo_lite.runtime.permits import (
    CELLS_OF_PERMIT,
    Permit,
    Permits,
    PermitVerdict,
    grant_of,
    verdict,
)


class MemoryFence:
    """Implements Fence, and is read by `open` and `verdict`. now: a clock in seconds, as
    `boottime`. permits: how many may be open at a time."""

    def __init__(self, now: Callable[[], float], permits: int):
        self._now = now
        self._cells = [0] * (CELLS_OF_PERMIT * permits)
        self.permits = Permits(self._cells)
        self._deadline = 0.0

    def open_until(self, deadline: float) -> None:
        self._deadline = deadline

    def open(self) -> bool:
        return self._now() < self._deadline

    def verdict(self, permit: Permit) -> PermitVerdict:
        return verdict(self._cells, permit)

    def grant_of(self, permit: Permit) -> int:
        return grant_of(self._cells, permit)

    def close(self) -> None:
        self._deadline = 0.0
        self.permits.close()
