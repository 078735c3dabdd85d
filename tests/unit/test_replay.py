"""Past decisions under other thresholds."""

from hypothesis import given
from hypothesis import strategies as st

from dynamo_lite.policy.decision.cost import Rates
from dynamo_lite.policy.decision.disagg import DecisionReason, Local, QueueView, Remote, decide
from dynamo_lite.policy.decision.replay import replay
from dynamo_lite.protocol.options import DecisionThresholds

THRESHOLDS = st.builds(
    DecisionThresholds,
    max_local_prefill_length=st.integers(0, 50),
    max_prefill_queue_size=st.integers(0, 5),
    queue_view_max_age_s=st.floats(0.1, 3),
    max_prefill_queue_tokens=st.integers(0, 40),
)
QUEUES = st.none() | st.builds(
    QueueView,
    jobs=st.integers(0, 6),
    prefill_workers=st.integers(0, 2),
    read_at=st.floats(-4, 0),
    tokens=st.integers(0, 50),
    takes_s=st.none() | st.floats(0, 3),
)


@given(
    prompt=st.integers(1, 100),
    cached=st.integers(0, 99),
    queue=QUEUES,
    then=THRESHOLDS,
    now=THRESHOLDS,
    left_s=st.floats(0, 3),
)
def test_it_is_what_would_have_been_decided(
    prompt: int,
    cached: int,
    queue: QueueView | None,
    then: DecisionThresholds,
    now: DecisionThresholds,
    left_s: float,
):
    inputs = {"prompt_tokens": prompt, "cached_tokens": min(cached, prompt - 1), "queue": queue}
    inputs["time_left_s"] = left_s
    taken = decide(**inputs, thresholds=then, now=0.0)
    assert replay(taken, **inputs, thresholds=then, now=0.0) == taken
    assert replay(taken, **inputs, thresholds=now, now=0.0) == decide(
        **inputs, thresholds=now, now=0.0
    )
    for fixed in (Local(DecisionReason.LEAVING), Local(DecisionReason.NOT_TRANSFERABLE)):
        assert replay(fixed, **inputs, thresholds=now, now=0.0) == fixed


def test_who_waited_for_another_one_keeps_that_reason_or_goes_elsewhere():
    inputs = {
        "prompt_tokens": 100,
        "cached_tokens": 90,
        "queue": QueueView(jobs=0, prefill_workers=1, read_at=0.0),
        "now": 0.0,
    }
    taken = Local(DecisionReason.SINGLE_FLIGHT)
    for length, expected in ((20, taken), (5, Remote(DecisionReason.LONG))):
        thresholds = DecisionThresholds(
            max_local_prefill_length=length, max_prefill_queue_size=4, queue_view_max_age_s=2.0
        )
        assert replay(taken, **inputs, thresholds=thresholds) == expected


def test_costs_are_not_known_before_they_were_measured():
    assert Rates().local_s(10) is None and Rates().remote_s(10) is None
    assert Rates(100.0, 1000.0, 0.5).local_s(50) == 0.5
    assert Rates(100.0, 1000.0, 0.5).remote_s(500) == 1.0
