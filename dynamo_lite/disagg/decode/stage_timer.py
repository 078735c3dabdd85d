"""How long each remote prefill took between its stations, as its decode engine sees it.

    decided ─decide─► asked ─publish─► queued ─pull─► pulled ─claim─► claimed
            ─fill─► received ─resume─► scheduled

`notice` is the end of `fill`, from the end of the last write on. Only durations are told
between hosts: a clock says nothing on another one. What is traced is noted as spans, too.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass

from dynamo_lite.disagg.counters import Counters
from dynamo_lite.disagg.span_notes import note_child, note_span
from dynamo_lite.protocol.trace import TraceContext
from dynamo_lite.runtime.clock import SYSTEM_CLOCK, Clock

#: Remote prefills whose writers have not said yet that they are done.
_MAX_UNTOLD = 1024
#: An engine makes steps for so long after a commit, until the writer has said so.
_TELLS_WITHIN_S = 5.0


@dataclass
class _Stages:
    """trace: of the attempt's span; above: of the request's. told: its writer has said that
    it is done; took_s: see `WriterDone`."""

    decided: float
    asked: float
    trace: TraceContext | None = None
    above: TraceContext | None = None
    published: float = 0.0
    pulled: float = 0.0
    granted: float = 0.0
    received: float = 0.0
    told: bool = False
    took_s: float | None = None

    def stages(self) -> dict[str, tuple[float, float]]:
        """From when to when, until its claim, as far as it came."""
        stages = {"decide": (self.decided, self.asked)}
        if on_queue := self._on_queue():
            stages["publish"] = self.asked, on_queue
            if self.granted:
                stages["pull"] = on_queue, self.pulled
                stages["claim"] = self.pulled, self.granted
        return stages

    def _on_queue(self) -> float:
        """A worker may pull the job before the broker has confirmed its push."""
        if not self.granted:
            return self.published
        return min(self.published or self.pulled, self.pulled)


class StageTimer:
    """Called on the engine's thread, but for `published`, `granted` and `done` (the
    bridge's).

    stats: takes the durations of what ended well, and spans; nothing is told of the rest.
    """

    def __init__(self, stats: Counters, clock: Clock = SYSTEM_CLOCK):
        self._stats, self._now = stats, clock.monotonic
        self._open: dict[str, _Stages] = {}
        self._received: dict[str, tuple[float, TraceContext | None]] = {}
        self._untold: OrderedDict[str, _Stages] = OrderedDict()
        self._noted = False
        self._lock = threading.Lock()  # an attempt goes from one to the other

    def asked(
        self, attempt: str, decided: float, above: TraceContext | None = None
    ) -> TraceContext | None:
        """A job was handed to the bridge; decided: when its prompt was looked at.

        above: where its request is traced. Returns where the attempt is.
        """
        trace = None if above is None else above.child()
        self._open[attempt] = _Stages(decided, self._now(), trace, above)
        return trace

    def published(self, attempt: str) -> None:
        if (handover := self._open.get(attempt)) is not None:
            handover.published = self._now()

    def granted(self, attempt: str, held_s: float = 0.0) -> None:
        """held_s: how long its claimant has had the job."""
        if (handover := self._open.get(attempt)) is not None:
            now = self._now()
            handover.pulled, handover.granted = max(handover.asked, now - held_s), now

    def done(self, attempt: str, took_s: float | None) -> None:
        """Its writer says so. took_s: from the claim to the end of its last write; None
        where that is not known, or did not come."""
        with self._lock:
            if (handover := self._open.get(attempt)) is not None:
                handover.told, handover.took_s = True, took_s
                return
            handover = self._untold.get(attempt)
        if handover is not None:
            if took_s is not None:
                self._tell_notice(handover, took_s)
            with self._lock:
                self._untold.pop(attempt, None)
                self._noted = True

    def stepped(self) -> None:
        """The engine begins a step, which takes along what was counted and noted so far."""
        self._noted = False

    @property
    def busy(self) -> bool:
        """Whether the engine must make steps: counts and notes leave it with a step only.

        The writer's last message may come when the request has ended already.
        """
        with self._lock:
            if self._noted or not self._untold:
                return self._noted
            last = next(reversed(self._untold.values()))
            return self._now() - last.received < _TELLS_WITHIN_S

    def ended(
        self, attempt: str, request_id: str, *, committed: bool, outcome: str = ""
    ) -> dict[str, float]:
        """The request waits no longer; committed: because its KV came.

        Returns how long its stages took: without a commit as far as they came, and
        `lost` from there on.
        """
        with self._lock:
            handover = self._open.pop(attempt, None)
            now = self._now()
            if handover is None:
                return {}
            if committed and handover.granted:
                handover.received = now
                if not handover.told:
                    self._untold[attempt] = handover
                    if len(self._untold) > _MAX_UNTOLD:
                        self._untold.popitem(last=False)
        self._trace(handover, attempt, now, outcome)
        stages = {stage: end - start for stage, (start, end) in handover.stages().items()}
        if not handover.received:
            return {**stages, "lost": now - handover.decided - sum(stages.values())}
        stages["fill"] = now - handover.granted
        self._received[request_id] = now, handover.above
        for stage, seconds in stages.items():
            self._stats.add_stage(stage, seconds)
        if handover.took_s is not None:
            self._tell_notice(handover, handover.took_s)
        return stages

    def scheduled(self, request_id: str) -> float | None:
        """The engine computes the request's last prompt token. Returns how long after its
        KV came; None where it did not."""
        received, above = self._received.pop(request_id, (None, None))
        if received is None:
            return None
        now = self._now()
        self._stats.add_stage("resume", now - received)
        if above is not None:
            note_child(self._stats, "resume", above, received, now)
        return now - received

    def forget(self, request_id: str) -> None:
        self._received.pop(request_id, None)

    def _tell_notice(self, handover: _Stages, took_s: float) -> None:
        fill_s = handover.received - handover.granted
        notice_s = max(0.0, fill_s - took_s)
        self._stats.add_stage("notice", notice_s)
        if handover.trace is not None:
            start = handover.received - notice_s
            note_child(self._stats, "notice", handover.trace, start, handover.received)

    def _trace(self, handover: _Stages, attempt: str, now: float, outcome: str) -> None:
        trace, above = handover.trace, handover.above
        if trace is None or above is None:
            return
        named = {"dynamo_lite.attempt": attempt, "dynamo_lite.outcome": outcome}
        note_span(
            self._stats,
            "remote prefill",
            trace,
            above.span_id,
            handover.asked,
            now,
            attributes=named,
        )
        stages = handover.stages()
        for stage, name in (("publish", "publish"), ("pull", "queue wait")):
            if stage in stages:
                note_child(self._stats, name, trace, *stages[stage])
