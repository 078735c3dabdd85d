"""The local-or-remote decision: every reason, and where exactly it changes."""

from dataclasses import replace

import pytest

from dynamo_lite.disagg.decision.rule import DecisionReason, decide
from dynamo_lite.protocol.decisions import DecisionInputs, QueueSeen
from dynamo_lite.protocol.options import DisaggOptions

LIMITS = DisaggOptions(
    max_local_prefill_length=100, max_prefill_queue_size=4, queue_view_max_age_s=2.0
)
ALWAYS = replace(LIMITS, max_local_prefill_length=0)
NEVER = replace(LIMITS, max_prefill_queue_size=0)


def verdict(prompt, cached=0, *, jobs=0, workers=1, age=0.0, queue=True, limits=LIMITS, **more):
    seen = QueueSeen(jobs=jobs, prefill_workers=workers, age_s=age) if queue else None
    inputs = DecisionInputs(prompt_tokens=prompt, cached_tokens=cached, queue=seen, **more)
    return decide(inputs, limits)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (verdict(101), DecisionReason.LONG),
        (verdict(100), DecisionReason.SHORT),
        (verdict(1), DecisionReason.SHORT),
        (verdict(2, limits=ALWAYS), DecisionReason.LONG),
        # A prefix hit shortens the prompt to what is left to compute.
        (verdict(164, 64), DecisionReason.CACHED),
        (verdict(165, 64), DecisionReason.LONG),
        (verdict(101, 96), DecisionReason.CACHED),
        (verdict(100, 96), DecisionReason.SHORT),
        (verdict(5000, 4992), DecisionReason.CACHED),
        # The queue has room for the fourth job, not for a fifth.
        (verdict(101, jobs=3), DecisionReason.LONG),
        (verdict(101, jobs=4), DecisionReason.QUEUE_FULL),
        (verdict(101, jobs=5), DecisionReason.QUEUE_FULL),
        (verdict(101, workers=0), DecisionReason.NO_PREFILL_WORKER),
        (verdict(101, workers=7), DecisionReason.LONG),
        (verdict(101, limits=NEVER), DecisionReason.QUEUE_FULL),
        # A view is good up to its age limit, and no view is no help.
        (verdict(101, age=2.0), DecisionReason.LONG),
        (verdict(101, age=2.001), DecisionReason.QUEUE_UNKNOWN),
        (verdict(101, queue=False), DecisionReason.QUEUE_UNKNOWN),
        # A prefix that another request's remote prefill has brought.
        (verdict(164, 64, prefix_awaited=True), DecisionReason.SINGLE_FLIGHT),
        (verdict(165, 64, prefix_awaited=True), DecisionReason.LONG),
        (verdict(100, 96, prefix_awaited=True), DecisionReason.SHORT),
        (verdict(101, transferable=False), DecisionReason.NOT_TRANSFERABLE),
        (verdict(101, leaving=True), DecisionReason.LEAVING),
        # The reason that is given when several conditions hold.
        (verdict(50, transferable=False, leaving=True), DecisionReason.NOT_TRANSFERABLE),
        (verdict(50, leaving=True, age=9), DecisionReason.LEAVING),
        (verdict(50, jobs=9, workers=0, age=9), DecisionReason.SHORT),
        (verdict(101, jobs=9, workers=0, age=9), DecisionReason.QUEUE_UNKNOWN),
        (verdict(101, jobs=9, workers=0), DecisionReason.NO_PREFILL_WORKER),
    ],
)
def test_verdicts(asked, expected):
    assert asked == expected


def loaded(tokens: int = 0, *, most: int = 1000, left_s: float = 5.0):
    """A long prompt, and a queue of which this is known."""
    seen = QueueSeen(jobs=1, prefill_workers=1, age_s=0.0, tokens=tokens)
    return decide(
        DecisionInputs(prompt_tokens=200, cached_tokens=0, queue=seen, time_left_s=left_s),
        replace(LIMITS, max_prefill_queue_tokens=most),
    )


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (loaded(999), DecisionReason.LONG),
        (loaded(1000), DecisionReason.QUEUE_TOKENS),
        (loaded(10**9, most=0), DecisionReason.LONG),
        (loaded(left_s=0.1), DecisionReason.LONG),
        (loaded(left_s=0.0), DecisionReason.TOO_LATE),
        (loaded(1000, left_s=0.0), DecisionReason.QUEUE_TOKENS),
    ],
)
def test_too_many_tokens_and_no_time_left_keep_a_prompt_here(asked, expected):
    assert asked == expected
