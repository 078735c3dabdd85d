"""How long each remote prefill took between its stations, as its decode engine sees it.

    decided ─decide─► asked ─publish─► queued ─pull─► claimed ─fill─► received ─resume─► scheduled

Only durations leave this process: its clock says nothing on another host.
"""

from dataclasses import dataclass

from dynamo_lite.engine.remote_prefill.counts import Counts
from dynamo_lite.runtime.clock import SYSTEM_CLOCK, Clock


@dataclass
class _Handover:
    decided: float
    asked: float
    published: float = 0.0
    granted: float = 0.0


class HandoverClock:
    """Called on the engine's thread, but for `published` and `granted` (the bridge's).

    stats: takes the durations of what ended well; nothing is told of the rest.
    """

    def __init__(self, stats: Counts, clock: Clock = SYSTEM_CLOCK):
        self._stats, self._now = stats, clock.monotonic
        self._open: dict[str, _Handover] = {}
        self._received: dict[str, float] = {}

    def asked(self, attempt: str, decided: float) -> None:
        """A job was handed to the bridge; decided: when its prompt was looked at."""
        self._open[attempt] = _Handover(decided, self._now())

    def published(self, attempt: str) -> None:
        if (handover := self._open.get(attempt)) is not None:
            handover.published = self._now()

    def granted(self, attempt: str) -> None:
        if (handover := self._open.get(attempt)) is not None:
            handover.granted = self._now()

    def ended(self, attempt: str, request_id: str, *, committed: bool) -> None:
        """The request waits no longer; committed: because its KV came."""
        handover = self._open.pop(attempt, None)
        if handover is None or not committed or not handover.granted:
            return
        self._received[request_id] = now = self._now()
        # A worker may claim the job before the broker has confirmed its push.
        on_queue = min(handover.published or handover.granted, handover.granted)
        self._stats.add_stage("decide", handover.asked - handover.decided)
        self._stats.add_stage("publish", on_queue - handover.asked)
        self._stats.add_stage("pull", handover.granted - on_queue)
        self._stats.add_stage("fill", now - handover.granted)

    def scheduled(self, request_id: str) -> None:
        """The engine computes the request's last prompt token."""
        if (received := self._received.pop(request_id, None)) is not None:
            self._stats.add_stage("resume", self._now() - received)

    def forget(self, request_id: str) -> None:
        self._received.pop(request_id, None)
