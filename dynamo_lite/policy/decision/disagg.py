"""The decision between local and remote prefill.

A remote prefill costs a wait in the queue, a transfer and one step of delay. A long local one
delays every request that decodes in the same engine. So remote needs both: many uncached tokens,
and room in the queue.
"""

import enum
import math
from dataclasses import dataclass

from dynamo_lite.protocol.options import DecisionThresholds


class DecisionReason(enum.Enum):
    """Why a verdict came out as it did; the label of the decision counter."""

    LONG = "long"
    SHORT = "short"
    CACHED = "cached"
    SINGLE_FLIGHT = "single_flight"  # cached by a remote prefill that it waited for
    QUEUE_FULL = "queue_full"
    QUEUE_TOKENS = "queue_tokens"
    TOO_LATE = "too_late"
    QUEUE_UNKNOWN = "queue_unknown"
    NO_PREFILL_WORKER = "no_prefill_worker"
    LEAVING = "leaving"
    NOT_TRANSFERABLE = "not_transferable"
    # By learned costs, see `policy/decision/cost_policy.py`.
    CHEAPER = "cheaper"
    CROWDED = "crowded"  # cheaper here only because prefill workers are busy
    EXPLORED = "explored"  # the other side was as good, and is measured again


#: Reasons of local verdicts which mean that there are too few prefill workers.
WANT_OF_ROOM = frozenset(
    {
        DecisionReason.QUEUE_FULL,
        DecisionReason.QUEUE_TOKENS,
        DecisionReason.TOO_LATE,
        DecisionReason.CROWDED,
    }
)


@dataclass(frozen=True)
class Local:
    """Prefill in the decode engine, in chunks beside its decodes."""

    reason: DecisionReason


@dataclass(frozen=True)
class Remote:
    """Ask a prefill worker."""

    reason: DecisionReason


Verdict = Local | Remote


@dataclass(frozen=True)
class QueueView:
    """What a decode worker knows of the queue."""

    #: Jobs waiting and in flight when the queue was read, plus this worker's own jobs since then.
    jobs: int
    #: Number of prefill workers that respond and have no known failed link to this engine.
    prefill_workers: int
    #: Monotonic seconds.
    read_at: float
    #: Outstanding tokens of all engines.
    tokens: int = 0
    #: Estimated seconds until a job for this prompt would start; None without measured rates.
    wait_s: float | None = None
    #: Estimated seconds until its KV would be here; None without measured rates.
    takes_s: float | None = None
    #: Number of prefill workers that respond.
    prefill_workers_alive: int | None = None
    #: Queued tokens before the prompt's job, queued tokens after it, and claimed tokens.
    earlier_tokens: int = 0
    later_tokens: int = 0
    claimed_tokens: int = 0
    #: Counter of the tokens that all engines have requested.
    asked_tokens: int = 0


def fresh(queue: QueueView | None, thresholds: DecisionThresholds, now: float) -> QueueView | None:
    """The view, or None if it is too old."""
    if queue is None or now - queue.read_at > thresholds.queue_view_max_age_s:
        return None
    return queue


def too_late(queue: QueueView, time_left_s: float) -> bool:
    """Whether a remote prefill would start after its time limit.

    Only the wait counts: the duration of the job itself is only known from mostly shorter jobs.
    """
    return time_left_s <= 0 or (queue.wait_s is not None and queue.wait_s > time_left_s)


def decide(
    *,
    prompt_tokens: int,
    cached_tokens: int,
    queue: QueueView | None,
    thresholds: DecisionThresholds,
    now: float,
    time_left_s: float = math.inf,
) -> Verdict:
    """The verdict for one prompt.

    cached_tokens: the engine's own prefix hit, so that the difference is the exact number of tokens
    to compute. now: monotonic seconds. time_left_s: time limit of a remote prefill.
    """
    uncached = prompt_tokens - cached_tokens
    # The last token is always computed here, since the first new one is sampled from it.
    limit = max(thresholds.max_local_prefill_length, 1)
    if uncached <= limit:
        return Local(DecisionReason.CACHED if prompt_tokens > limit else DecisionReason.SHORT)
    queue = fresh(queue, thresholds, now)
    if queue is None:
        return Local(DecisionReason.QUEUE_UNKNOWN)
    if queue.prefill_workers == 0:
        return Local(DecisionReason.NO_PREFILL_WORKER)
    if queue.jobs >= thresholds.max_prefill_queue_size:
        return Local(DecisionReason.QUEUE_FULL)
    if 0 < thresholds.max_prefill_queue_tokens <= queue.tokens:
        return Local(DecisionReason.QUEUE_TOKENS)
    if too_late(queue, time_left_s):
        return Local(DecisionReason.TOO_LATE)
    return Remote(DecisionReason.LONG)
