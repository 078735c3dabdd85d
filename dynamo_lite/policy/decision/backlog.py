"""The backlog of all decode engines at the prefill workers, and how fast it shrinks.

The state of a remote prefill is in its decode engine's ledger, from allocation to end, whatever
happens to the queue, the broker and the writer. So the sum over the engines needs no repair, except
that silent engines are removed.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamo_lite.policy.decision.lanes import BEFORE_LONG
from dynamo_lite.policy.fading_mean import FadingMean
from dynamo_lite.protocol.backlog import Backlog, Lane

#: An engine without a message for this long is gone; engines send one every second.
SILENCE_S = 3.0
#: An engine without changes sends a message after this long.
IDLE_PERIOD_S = 1.0
#: The shortest time between two messages of an engine, while there are few engines.
_PERIOD_S = 0.02
#: Every engine receives the messages of all others. A message costs about 60 us of a core
#: (`benchmarks.scale`), so beyond this many in a second all engines send fewer; see
#: `notice_period_s`.
_NOTICES_PER_S = 1000.0
#: How often the queue's depth is read, by one engine for all.
_READING_PERIOD_S = 0.25
#: A rate without a new measurement for this long is discarded: only a new job can measure it.
_RATE_KEEPS_S = 60.0


@dataclass(frozen=True)
class BacklogTotals:
    """The backlog of one engine, or the sum over all engines; see `Backlog`."""

    queued_jobs: int = 0
    #: Lanes without tokens may be left out.
    queued_tokens: Mapping[Lane, int] = field(default_factory=dict[Lane, int])
    claimed_jobs: int = 0
    claimed_tokens: int = 0
    #: Counters, which never decrease: tokens that were requested from prefill workers, and tokens
    #: that were not requested because the queue had no room. One engine counts since its start.
    #: The sum counts since the receiver began to listen, without tokens from before an engine's
    #: first message.
    asked_tokens: int = 0
    overflow_tokens: int = 0

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
            self.asked_tokens + other.asked_tokens,
            self.overflow_tokens + other.overflow_tokens,
        )

    def ahead_of(self, lane: Lane) -> int:
        """Tokens that are computed before a new job in this lane.

        Long jobs wait for all claimed ones; others have slots of their own.
        """
        queued = sum(self.queued_tokens.get(one, 0) for one in _UP_TO[lane])
        return queued + (0 if lane in BEFORE_LONG else self.claimed_tokens)


_UP_TO = {lane: tuple(Lane)[: i + 1] for i, lane in enumerate(Lane)}


@dataclass(slots=True)
class _Received:
    backlog: Backlog
    at: float


class Backlogs:
    """The last message of each engine, and their sums. now: monotonic seconds, on the receiver's
    clock; it never decreases.

    A message changes the sums by its difference to the sender's last one, so it costs the same
    however many engines there are.
    """

    def __init__(self) -> None:
        #: In the order of their arrival, so that the silent ones come first.
        self._received: OrderedDict[str, _Received] = OrderedDict()
        self._queued_jobs = self._claimed_jobs = self._claimed_tokens = 0
        self._queued_tokens = dict.fromkeys(Lane, 0)
        self._asked_tokens = self._overflow_tokens = 0

    def hear(self, backlog: Backlog, now: float) -> int | None:
        """Returns the tokens that were completed since the engine's last message; None for a stale
        message."""
        last = self._received.get(backlog.engine_id)
        before = None if last is None else last.backlog
        if before is not None and backlog.number <= before.number:
            return None
        self._forget(now)
        self._remove(backlog.engine_id)
        if not backlog.leaving:
            self._received[backlog.engine_id] = _Received(backlog, now)
            self._count(backlog, 1)
        if before is None:
            return 0
        self._asked_tokens += max(backlog.asked_tokens - before.asked_tokens, 0)
        self._overflow_tokens += max(backlog.overflow_tokens - before.overflow_tokens, 0)
        return max(backlog.done_tokens - before.done_tokens, 0)

    def engines(self, now: float) -> int:
        """How many engines are not silent."""
        self._forget(now)
        return len(self._received)

    def before(self, engine_id: str, now: float) -> int:
        """How many engines that are not silent have a smaller id."""
        self._forget(now)
        return sum(other < engine_id for other in self._received)

    def totals(self, now: float) -> BacklogTotals:
        """The sum over all engines that are not silent."""
        self._forget(now)
        return BacklogTotals(
            self._queued_jobs,
            {lane: tokens for lane, tokens in self._queued_tokens.items() if tokens},
            self._claimed_jobs,
            self._claimed_tokens,
            self._asked_tokens,
            self._overflow_tokens,
        )

    def _forget(self, now: float) -> None:
        while self._received:
            engine_id = next(iter(self._received))
            if now - self._received[engine_id].at <= SILENCE_S:
                return
            self._remove(engine_id)

    def _remove(self, engine_id: str) -> None:
        if (received := self._received.pop(engine_id, None)) is not None:
            self._count(received.backlog, -1)

    def _count(self, backlog: Backlog, sign: int) -> None:
        self._queued_jobs += sign * backlog.queued_jobs
        for lane, tokens in backlog.queued_tokens.items():
            self._queued_tokens[lane] += sign * tokens
        self._claimed_jobs += sign * backlog.claimed_jobs
        self._claimed_tokens += sign * backlog.claimed_tokens


def notice_period_s(engines: int) -> float:
    """The shortest time between two messages of one engine, when there are `engines` in all.

    So an engine receives at most `_NOTICES_PER_S` messages per second, unless the idle
    messages of all engines alone exceed this.
    """
    return min(max(_PERIOD_S, engines / _NOTICES_PER_S), IDLE_PERIOD_S)


def reads_after_s(rank: int, max_age_s: float) -> float:
    """How long an engine waits for another one's reading of the queue's depth before it reads the
    depth itself.

    rank: how many live engines come before it. The first engine reads. Each other engine waits
    longer than the one before it, so that only one or a few take over when the first one is gone.
    max_age_s: age from which a reading counts as unknown; an engine that receives no readings
    reads twice in that time.
    """
    most = max(max_age_s / 2, _READING_PERIOD_S)
    return _READING_PERIOD_S + (most - _READING_PERIOD_S) * rank / (rank + 4)


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
