"""The decision between local and remote prefill.

A remote prefill costs a wait in the queue, a transfer and one step of delay. A long local one
delays every request that decodes in the same engine. So remote needs both: many uncached tokens,
and room in the queue.
"""

import enum
from typing import Literal

from dynamo_lite.protocol.decisions import DecisionInputs
from dynamo_lite.protocol.options import DisaggOptions


class DecisionReason(enum.Enum):
    """A verdict by its reason; the label of the decision counter."""

    LONG = "long"  # ask a prefill worker; all others: prefill here, in chunks beside the decodes
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

    @property
    def verdict(self) -> Literal["remote", "local"]:
        return "remote" if self is DecisionReason.LONG else "local"


#: Reasons of local verdicts which mean that there are too few prefill workers. Such prompts may
#: wait for another request's remote prefill.
WANT_OF_ROOM = frozenset({DecisionReason.QUEUE_FULL, DecisionReason.QUEUE_TOKENS})
#: Such prompts count as overflow. Without the broker prefill workers have no load; the planner must
#: not take that for a lack of demand.
OVERFLOW_REASONS = WANT_OF_ROOM | {DecisionReason.QUEUE_UNKNOWN}


def uncached_tokens(inputs: DecisionInputs) -> int:
    """Those that a local prefill would compute."""
    return inputs.prompt_tokens - inputs.cached_tokens - inputs.offloaded_tokens


def decide(inputs: DecisionInputs, thresholds: DisaggOptions) -> DecisionReason:
    """The verdict for one prompt."""
    if not inputs.transferable:
        return DecisionReason.NOT_TRANSFERABLE
    if inputs.leaving:
        return DecisionReason.LEAVING
    # The last token is always computed here, since the first new one is sampled from it.
    limit = max(thresholds.max_local_prefill_length, 1)
    if uncached_tokens(inputs) <= limit:
        if inputs.prompt_tokens <= limit:
            return DecisionReason.SHORT
        return DecisionReason.SINGLE_FLIGHT if inputs.prefix_awaited else DecisionReason.CACHED
    queue = inputs.queue
    if queue is None or queue.age_s > thresholds.queue_view_max_age_s:
        return DecisionReason.QUEUE_UNKNOWN
    if queue.prefill_workers == 0:
        return DecisionReason.NO_PREFILL_WORKER
    if queue.jobs >= thresholds.max_prefill_queue_size:
        return DecisionReason.QUEUE_FULL
    if 0 < thresholds.max_prefill_queue_tokens <= queue.tokens:
        return DecisionReason.QUEUE_TOKENS
    if inputs.time_left_s <= 0:
        return DecisionReason.TOO_LATE
    return DecisionReason.LONG
