"""The backlog of all decode engines at the prefill workers, and how fast it shrinks.

The state of a remote prefill is in its decode engine's ledger, from allocation to end, whatever
happens to the queue, the broker and the writer. So the sum over the engines needs no repair, except
that silent engines are removed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamo_lite.policy.cost import FadingMean
from dynamo_lite.policy.lanes import BEFORE_LONG
from dynamo_lite.protocol.backlog import Backlog, Lane

#: An engine without a message for this long is gone; engines send one every second.
SILENCE_S = 3.0
#: A rate without a new measurement for this long is discarded: only a new job can measure it.
_RATE_KEEPS_S = 60.0


@dataclass(frozen=True)
class BacklogTotals:
    """Of one engine, or of all; see `Backlog`."""

    queued_jobs: int = 0
    queued_tokens: Mapping[Lane, int] = field(default_factory=dict[Lane, int])
    claimed_jobs: int = 0
    claimed_tokens: int = 0

    @property
    def jobs(self) -> int:
        return self.queued_jobs + self.claimed_jobs

    @property
    def tokens(self) -> int:
        """Outstanding tokens: on the queue, or claimed and not completely received."""
        return sum(self.queued_tokens.values()) + self.claimed_tokens

    def __add__(self, other: "BacklogTotals") -> "BacklogTotals":
        return BacklogTotals(
            self.queued_jobs + other.queued_jobs,
            {
                lane: self.queued_tokens.get(lane, 0) + other.queued_tokens.get(lane, 0)
                for lane in Lane
                if lane in self.queued_tokens or lane in other.queued_tokens
            },
            self.claimed_jobs + other.claimed_jobs,
            self.claimed_tokens + other.claimed_tokens,
        )

    def ahead_of(self, lane: Lane) -> int:
        """Tokens that are computed before a new job in this lane.

        Long jobs wait for all claimed ones; others have slots of their own.
        """
        queued = sum(self.queued_tokens.get(one, 0) for one in _UP_TO[lane])
        return queued + (0 if lane in BEFORE_LONG else self.claimed_tokens)


_UP_TO = {lane: tuple(Lane)[: i + 1] for i, lane in enumerate(Lane)}


@dataclass
class _Received:
    demand: Backlog
    at: float


class Backlogs:
    """The last message of each engine. now: monotonic seconds, on the receiver's clock."""

    def __init__(self) -> None:
        self._received: dict[str, _Received] = {}

    def hear(self, demand: Backlog, now: float) -> int | None:
        """Returns the tokens that were completed since the engine's last message; None for a stale
        message."""
        before = self._received.get(demand.engine_id)
        if before is not None and demand.number <= before.demand.number:
            return None
        self._forget(now)
        if demand.leaving:
            self._received.pop(demand.engine_id, None)
        else:
            self._received[demand.engine_id] = _Received(demand, now)
        return 0 if before is None else max(demand.done_tokens - before.demand.done_tokens, 0)

    def totals(self, now: float) -> BacklogTotals:
        """The sum over all engines that are not silent."""
        self._forget(now)
        return sum(
            (_totals(received.demand) for received in self._received.values()), BacklogTotals()
        )

    def _forget(self, now: float) -> None:
        for engine_id, received in list(self._received.items()):
            if now - received.at > SILENCE_S:
                del self._received[engine_id]


def _totals(demand: Backlog) -> BacklogTotals:
    return BacklogTotals(
        demand.queued_jobs, demand.queued_tokens, demand.claimed_jobs, demand.claimed_tokens
    )


class DrainRate:
    """Tokens that one busy prefill worker computes and delivers in a second.

    There are as many busy workers as claimed jobs, at most all. Idle time does not count.
    """

    def __init__(self) -> None:
        self._mean = FadingMean()
        self._at: float | None = None
        self._busy_s = 0.0
        self._busy = 0
        self._measured_at = 0.0

    def moved(self, now: float, *, done_tokens: int, claimed_jobs: int, workers: int) -> None:
        """Adds a measurement.

        done_tokens: since the last call. claimed_jobs, workers: from now on.
        """
        if self._at is not None:
            self._busy_s += self._busy * max(now - self._at, 0.0)
        if now - self._measured_at > _RATE_KEEPS_S:
            # Old measurements are discarded in favour of the new one.
            self._mean, self._busy_s = FadingMean(), min(self._busy_s, _RATE_KEEPS_S)
        self._at, self._busy = now, min(claimed_jobs, workers)
        if done_tokens and self._busy_s > 0:
            self._mean.add(done_tokens, self._busy_s)
            self._busy_s, self._measured_at = 0.0, now

    def tokens_per_s(self, now: float) -> float | None:
        """None while it is not known, or if the last measurement is too old."""
        if now - self._measured_at > _RATE_KEEPS_S:
            return None
        return self._mean.value


def wait_s(totals: BacklogTotals, lane: Lane, *, rate: float | None, workers: int) -> float | None:
    """Estimated seconds until a new job in this lane starts; None without a rate. rate: see
    `DrainRate`."""
    if not rate or not workers:
        return None
    return totals.ahead_of(lane) / (rate * workers)
