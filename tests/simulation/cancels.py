"""Aborted requests: their states, and how long cancels take to the writers of their KV."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dynamo_lite.policy.attempts.attempt import AttemptState
from dynamo_lite.protocol.prefill import decode_cancel_attempt
from tests.simulation.engine.assembly import SimEngineProcess
from tests.simulation.engine.halves import DecodeHalves
from tests.simulation.engine.request import SimRequest, SimRequestStatus


@dataclass
class CancelWatch:
    """Aborts in decode engines, and the cancels that they cause."""

    #: Virtual time.
    now: Callable[[], float]
    #: Returns when the caller of a request has cancelled it, or None.
    began_at: Callable[[SimRequest], float | None]
    counts: Counter[str]
    #: Longest time of a cancel from a caller to a prefill worker.
    longest_s: float = 0.0
    #: Attempts with a cancel in flight, and when it began.
    _under_way: dict[str, float] = field(default_factory=dict[str, float])

    def aborting(self, engine: SimEngineProcess, request_ids: Sequence[str]) -> None:
        """To be called before these requests are aborted."""
        halves = engine.halves
        if not isinstance(halves, DecodeHalves):
            return
        for request_id in request_ids:
            request = engine.core.scheduler.requests.get(request_id)
            if request is None:
                self.counts["abort over"] += 1
                continue
            attempt, state = halves.stage(request)
            self.counts[f"abort {_place(request, state)}"] += 1
            if state is AttemptState.CLAIMED and attempt is not None and halves.writes(attempt):
                self.counts["cancels sent to writers"] += 1
                began = self.began_at(request)
                self._under_way[attempt] = self.now() if began is None else began

    def heard(self, payload: bytes) -> float | None:
        """A prefill worker has received a cancel. Returns how long it took, None if it is a
        repetition."""
        began = self._under_way.pop(decode_cancel_attempt(payload).attempt, None)
        if began is None:
            return None
        took_s = self.now() - began
        self.counts["cancels that reached writers"] += 1
        self.longest_s = max(self.longest_s, took_s)
        return took_s

    @property
    def under_way(self) -> list[str]:
        """Attempts with a cancel that has not reached the writer."""
        return list(self._under_way)


def _place(request: SimRequest, state: AttemptState | None) -> str:
    """The attempt's state in the ledger; without one, the request's state in the engine."""
    if state is not None:
        return state.value
    return "between" if request.status is SimRequestStatus.PARKED else request.status.value
