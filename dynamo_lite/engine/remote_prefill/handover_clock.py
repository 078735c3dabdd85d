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

    def stages_s(self) -> dict[str, float]:
        """Until its claim, as far as it came."""
        stages = {"decide": self.asked - self.decided}
        if on_queue := self._on_queue():
            stages["publish"] = on_queue - self.asked
            if self.granted:
                stages["pull"] = self.granted - on_queue
        return stages

    def _on_queue(self) -> float:
        """A worker may claim the job before the broker has confirmed its push."""
        if not self.granted:
            return self.published
        return min(self.published or self.granted, self.granted)


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

    def ended(self, attempt: str, request_id: str, *, committed: bool) -> dict[str, float]:
        """The request waits no longer; committed: because its KV came.

        Returns how long its stages took: without a commit as far as they came, and
        `lost` from there on.
        """
        handover = self._open.pop(attempt, None)
        if handover is None:
            return {}
        stages, now = handover.stages_s(), self._now()
        if not committed or not handover.granted:
            return {**stages, "lost": now - handover.decided - sum(stages.values())}
        stages["fill"] = now - handover.granted
        self._received[request_id] = now
        for stage, seconds in stages.items():
            self._stats.add_stage(stage, seconds)
        return stages

    def scheduled(self, request_id: str) -> float | None:
        """The engine computes the request's last prompt token. Returns how long after its
        KV came; None where it did not."""
        received = self._received.pop(request_id, None)
        if received is None:
            return None
        waited = self._now() - received
        self._stats.add_stage("resume", waited)
        return waited

    def forget(self, request_id: str) -> None:
        self._received.pop(request_id, None)
