"""Until when a decode engine polls for transfers although no request waits for one.

An idle engine makes no steps, and a NIXL connection is established only during steps. So a
prefill worker that connects or tests its link first sends a `Listen`. The bridge's thread
calls `extend`, the engine's thread everything else.
"""

from collections.abc import Callable

from dynamo_lite.protocol.prefill import Listen


class PollWindow:
    """now: monotonic."""

    def __init__(self, now: Callable[[], float]):
        self._now = now
        #: By the writer's lease id, monotonic seconds. Never changed, only replaced.
        self._until: dict[int, float] = {}

    def extend(self, listen: Listen) -> None:
        """The last message of each writer counts."""
        now = self._now()
        until = {**self._until, listen.writer_lease_id: now + listen.for_s}
        self._until = {writer: end for writer, end in until.items() if end > now}

    def __bool__(self) -> bool:
        until = self._until
        return bool(until) and max(until.values()) > self._now()
