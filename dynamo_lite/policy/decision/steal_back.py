"""Steal back: does a decode engine compute a queued prompt itself, now that this is cheaper?

A prompt is decided once. After that the queue may slow down or stop: workers leave, hang or get
long prompts first. A queued remote prefill that no worker has claimed can be taken back without
danger, because no worker may write its blocks.

Here:   target = local_s * (1 + streams) + max(0.1 s, 25 % of that)
There:  wait   = max(time for the tokens before it, how long it is overdue)

It is taken back if wait > target: then it is computed here before a worker would begin.

A prefill here pauses each stream beside it for about its own duration, and a second of a stream's
pause counts like a second of waiting for the first token. So a busy engine takes nothing back until
the wait is very long. The margin avoids taking back what comes anyway. A job that was not claimed
when it was expected to be is *overdue*; it is assumed to stay overdue for as long as it has been,
which bounds the loss to a constant factor whenever the job would have been claimed (as in ski
rental: https://en.wikipedia.org/wiki/Ski_rental_problem).

All engines see the same totals, so all would act at once and leave the workers idle. Therefore an
engine acts with the probability 1 - target / wait. The next look comes after the others' next
notices, which show what they have taken back.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

#: Least saving for which a prefill is taken back, in seconds, and as a share of the local cost.
MARGIN_S, MARGIN_SHARE = 0.1, 0.25
#: A job counts as overdue this long after it was expected to be claimed: a claim, a reconnect or a
#: slow step may take as long.
PATIENCE_S = 1.0


class StealReason(enum.Enum):
    """The outcome of a look at the queued remote prefills; label of a counter."""

    QUEUE_LONG = "queue_long"  # taken back: by the measured rate it would start too late
    OVERDUE = "overdue"  # taken back: it should have been claimed long ago
    PREFILL_HERE = "prefill_here"  # a prompt is computed here, or waits for its turn
    UNKNOWN = "unknown"  # no measured rate
    REMOTE_CHEAPER = "remote_cheaper"
    GONE = "gone"  # claimed or withdrawn during the look
    CHANCE = "chance"  # left to the other engines, until the next look


@dataclass(frozen=True)
class QueuedPrefill:
    """A remote prefill that no worker has claimed. Times are seconds; None: not known."""

    attempt: str
    #: Estimated time of the local prefill, if the engine computes nothing else.
    local_s: float | None
    #: Seconds since it was requested.
    waited_s: float
    #: How long it was expected to wait for a claim when it was requested.
    expected_s: float | None
    #: Estimated seconds that workers need for the tokens before it.
    ahead_s: float | None


@dataclass(frozen=True)
class TakeBack:
    """Compute this one here. target_s, wait_s: see the module."""

    reason: StealReason
    attempt: str
    target_s: float
    wait_s: float


@dataclass(frozen=True)
class LeaveQueued:
    """All stay in the queue until the next look."""

    reason: StealReason


def look(
    queued: Sequence[QueuedPrefill], *, streams: int, prefill_here: bool, number: int
) -> TakeBack | LeaveQueued:
    """Which queued remote prefill this engine takes back; at most one.

    queued: those of this engine, oldest first; at least one. streams: requests that decode here.
    prefill_here: whether a prompt is computed here or waits to be. number: of this look.
    """
    if prefill_here:
        return LeaveQueued(StealReason.PREFILL_HERE)
    known = [costs for each in queued if (costs := _costs(each, streams)) is not None]
    if not known:
        return LeaveQueued(StealReason.UNKNOWN)
    best = max(known, key=lambda costs: costs.wait_s - costs.target_s)
    if best.wait_s <= best.target_s:
        return LeaveQueued(StealReason.REMOTE_CHEAPER)
    if coin(best.attempt, number) >= 1 - best.target_s / best.wait_s:
        return LeaveQueued(StealReason.CHANCE)
    return best


def coin(attempt: str, number: int) -> float:
    """A number in [0, 1) that is evenly distributed over attempts and looks, and the same in every
    run."""
    digest = blake2b(f"{attempt}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


def _costs(queued: QueuedPrefill, streams: int) -> TakeBack | None:
    """None if a cost is not known."""
    overdue_s, ahead_s = 0.0, queued.ahead_s
    if queued.expected_s is not None:
        overdue_s = max(queued.waited_s - queued.expected_s - PATIENCE_S, 0.0)
    if queued.local_s is None or (ahead_s is None and queued.expected_s is None):
        return None
    local_s = queued.local_s * (1 + streams)
    target_s = local_s + max(MARGIN_S, MARGIN_SHARE * local_s)
    late = overdue_s > (ahead_s or 0.0)
    wait_s = max(overdue_s, ahead_s or 0.0)
    reason = StealReason.OVERDUE if late else StealReason.QUEUE_LONG
    return TakeBack(reason, queued.attempt, target_s, wait_s)
