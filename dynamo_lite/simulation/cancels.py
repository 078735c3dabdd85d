"""Aborted requests: what they were at, and when the writers of their KV heard of it."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dynamo_lite.policy.ledger import AttemptState
from dynamo_lite.protocol.prefill import decode_cancel_attempt
from dynamo_lite.simulation.engine.assembly import Engine
from dynamo_lite.simulation.engine.halves import DecodeHalves
from dynamo_lite.simulation.engine.request import SimRequest, Status


@dataclass
class CancelWatch:
    """Aborts in decode engines, and the cancels that follow from them.

    began_at: when the caller of a request lost interest; None when it did not.
    longest_s: the longest way of a cancel from a caller to a prefill worker.
    """

    now: Callable[[], float]
    began_at: Callable[[SimRequest], float | None]
    counts: Counter[str]
    longest_s: float = 0.0
    _under_way: dict[str, float] = field(default_factory=dict[str, float])

    def aborting(self, engine: Engine, request_ids: Sequence[str]) -> None:
        """Before these requests are aborted."""
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
        """A prefill worker was told to stop. Returns how long that took, when it is news."""
        began = self._under_way.pop(decode_cancel_attempt(payload).attempt, None)
        if began is None:
            return None
        took_s = self.now() - began
        self.counts["cancels that reached writers"] += 1
        self.longest_s = max(self.longest_s, took_s)
        return took_s

    @property
    def under_way(self) -> list[str]:
        """Attempts whose writers have not heard yet."""
        return list(self._under_way)


def _place(request: SimRequest, state: AttemptState | None) -> str:
    """A state of the ledger, or where in the engine a request is that it does not know."""
    if state is not None:
        return state.value
    return "between" if request.status is Status.PARKED else request.status.value
