"""Until when a decode engine polls for transfers although nobody waits for any.

An idle engine makes no steps, and without steps no first contact ends. `hear` is called
by the bridge's thread, all else by the engine's.
"""

from collections.abc import Callable

from dynamo_lite.protocol.prefill import Listen


class PollWindow:
    """now: monotonic."""

    def __init__(self, now: Callable[[], float]):
        self._now = now
        self._until: dict[int, float] = {}  # by writer; never changed, only replaced

    def hear(self, listen: Listen) -> None:
        """Each writer's last word counts."""
        now = self._now()
        until = {**self._until, listen.writer_lease_id: now + listen.for_s}
        self._until = {writer: end for writer, end in until.items() if end > now}

    def __bool__(self) -> bool:
        until = self._until
        return bool(until) and max(until.values()) > self._now()
