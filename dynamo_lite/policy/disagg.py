"""The disaggregated router: prefill here, or ask for help?

A remote prefill pays for a queue, a transfer and a step's delay; a long local
one stalls every request that decodes beside it. Remote therefore needs both: a
prompt that is long where it counts (uncached), and a queue with room.
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
    SINGLE_FLIGHT = "single_flight"  # cached, by a remote prefill that it has waited for
    QUEUE_FULL = "queue_full"
    QUEUE_TOKENS = "queue_tokens"
    TOO_LATE = "too_late"
    QUEUE_UNKNOWN = "queue_unknown"
    NO_PREFILL_WORKER = "no_prefill_worker"
    LEAVING = "leaving"
    NOT_TRANSFERABLE = "not_transferable"


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
    """What a decode worker knows of the queue.

    jobs: waiting and in flight when it was read, plus what this worker has asked
    for since. prefill_workers: how many respond, and can write into this engine as far as
    is known; prefill_workers_alive: how many respond. read_at: monotonic seconds.
    tokens: outstanding, of all engines. wait_s: until a job like the one that is being
    decided is begun; takes_s: until its KV is there; None without measured rates.
    """

    jobs: int
    prefill_workers: int
    read_at: float
    tokens: int = 0
    wait_s: float | None = None
    takes_s: float | None = None
    prefill_workers_alive: int | None = None


def fresh(queue: QueueView | None, thresholds: DecisionThresholds, now: float) -> QueueView | None:
    """The view, unless it is too old."""
    if queue is None or now - queue.read_at > thresholds.queue_view_max_age_s:
        return None
    return queue


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

    cached_tokens is the engine's own prefix hit, so the difference is the exact
    number of tokens to compute. now is monotonic seconds. time_left_s: in which a
    remote prefill must be over.
    """
    uncached = prompt_tokens - cached_tokens
    # The last token is always computed here: it is the one that is sampled from.
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
    # The wait only: how long it takes itself is known from other jobs, mostly shorter ones.
    if time_left_s <= 0 or (queue.wait_s is not None and queue.wait_s > time_left_s):
        return Local(DecisionReason.TOO_LATE)
    return Remote(DecisionReason.LONG)
