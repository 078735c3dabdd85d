"""The decision between local and remote prefill.

A remote prefill costs a wait in the queue, a transfer and one step of delay. A long local one
delays every request that decodes in the same engine. So remote needs both: many uncached tokens,
and room in the queue.
"""

import enum
from dataclasses import dataclass

from dynamo_lite.protocol.decisions import DecisionInputs
from dynamo_lite.protocol.options import DecisionThresholds


class DecisionReason(enum.Enum):
    """Why a verdict came out as it did; the label of the decision counter."""

    LONG = "long"
    SHORT = "short"
    CACHED = "cached"
    SINGLE_FLIGHT = "single_flight"  # cached by a remote prefill that it waited for
    QUEUE_FULL = "queue_full"
    QUEUE_TOKENS = "queue_tokens"
    TOO_LATE = "too_late"  # the request's own time is over
    QUEUE_UNKNOWN = "queue_unknown"
    NO_PREFILL_WORKER = "no_prefill_worker"
    LEAVING = "leaving"
    NOT_TRANSFERABLE = "not_transferable"


#: Reasons of local verdicts which mean that there are too few prefill workers. Such prompts may
#: wait for another request's remote prefill.
WANT_OF_ROOM = frozenset({DecisionReason.QUEUE_FULL, DecisionReason.QUEUE_TOKENS})
#: Such prompts count as overflow. Without the broker prefill workers have no load; the planner must
#: not take that for a lack of demand.
OVERFLOW_REASONS = WANT_OF_ROOM | {DecisionReason.QUEUE_UNKNOWN}


@dataclass(frozen=True)
class Local:
    """Prefill in the decode engine, in chunks beside its decodes."""

    reason: DecisionReason


@dataclass(frozen=True)
class Remote:
    """Ask a prefill worker."""

    reason: DecisionReason


Verdict = Local | Remote


def decide(inputs: DecisionInputs, thresholds: DecisionThresholds) -> Verdict:
    """The verdict for one prompt."""
    if not inputs.transferable:
        return Local(DecisionReason.NOT_TRANSFERABLE)
    if inputs.leaving:
        return Local(DecisionReason.LEAVING)
    # The last token is always computed here, since the first new one is sampled from it.
    limit = max(thresholds.max_local_prefill_length, 1)
    if inputs.uncached_tokens <= limit:
        if inputs.prompt_tokens <= limit:
            return Local(DecisionReason.SHORT)
        return Local(
            DecisionReason.SINGLE_FLIGHT if inputs.prefix_awaited else DecisionReason.CACHED
        )
    queue = inputs.queue
    if queue is None or queue.age_s > thresholds.queue_view_max_age_s:
        return Local(DecisionReason.QUEUE_UNKNOWN)
    if queue.prefill_workers == 0:
        return Local(DecisionReason.NO_PREFILL_WORKER)
    if queue.jobs >= thresholds.max_prefill_queue_size:
        return Local(DecisionReason.QUEUE_FULL)
    if 0 < thresholds.max_prefill_queue_tokens <= queue.tokens:
        return Local(DecisionReason.QUEUE_TOKENS)
    if inputs.time_left_s <= 0:
        return Local(DecisionReason.TOO_LATE)
    return Remote(DecisionReason.LONG)
