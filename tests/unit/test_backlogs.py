"""What all decode engines want of prefill workers, and how fast it is done."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_lite.policy.decision.backlog import (
    SILENCE_S,
    Backlogs,
    BacklogTotals,
    DrainRate,
    notice_period_s,
    wait_s,
)
from dynamo_lite.protocol.backlog import Backlog, Lane
from tests.straightforward import StraightforwardBacklogs

few = st.integers(0, 5)
heard = st.builds(
    Backlog,
    engine_id=st.sampled_from("abcde"),
    number=st.integers(1, 30),
    queued_jobs=few,
    queued_tokens=st.dictionaries(st.sampled_from(Lane), few),
    claimed_jobs=few,
    claimed_tokens=few,
    done_tokens=st.integers(0, 50),
    asked_tokens=st.integers(0, 50),
    overflow_tokens=st.integers(0, 50),
    leaving=st.sampled_from([False, False, False, True]),
)


@given(st.lists(st.tuples(heard, st.floats(0, 2), st.booleans()), max_size=60))
def test_running_sums_are_the_sums(steps: list[tuple[Backlog, float, bool]]):
    sums, oracle, now = Backlogs(), StraightforwardBacklogs(), 0.0
    for message, later_s, look in steps:
        now += later_s
        assert sums.hear(message, now) == oracle.hear(message, now)
        if look:
            assert sums.totals(now) == oracle.totals(now)
            assert sums.engines(now) == oracle.engines(now)
    for at in (now, now + SILENCE_S / 2, now + 2 * SILENCE_S):
        assert sums.totals(at) == oracle.totals(at)
    assert sums.engines(now + 2 * SILENCE_S) == 0


def said(engine_id: str, number: int, **fields: object) -> Backlog:
    return Backlog(engine_id=engine_id, number=number, **fields)  # type: ignore[arg-type]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 20), st.integers(0, 9)), max_size=40)
)
def test_the_newest_notice_of_each_engine_counts_whatever_the_order(
    notices: list[tuple[str, int, int]],
):
    backlogs, newest = Backlogs(), dict[str, tuple[int, int]]()
    for engine_id, number, tokens in notices:
        backlog = said(engine_id, number, claimed_tokens=tokens)
        news = backlogs.hear(backlog, now=0.0) is not None
        assert news == (number > newest.get(engine_id, (0, 0))[0])
        if news:
            newest[engine_id] = number, tokens
    assert backlogs.totals(0.0).tokens == sum(tokens for _, tokens in newest.values())


def test_who_leaves_or_falls_silent_is_forgotten():
    backlogs = Backlogs()
    for engine_id, now in (("a", 0.0), ("b", 1.0), ("c", 1.0)):
        backlogs.hear(said(engine_id, 1, queued_jobs=1, queued_tokens={Lane.SHORT: 5}), now)
    assert backlogs.totals(1.0) == BacklogTotals(3, {Lane.SHORT: 15})
    backlogs.hear(said("c", 2, leaving=True), 1.0)
    assert backlogs.totals(SILENCE_S).jobs == 2
    assert backlogs.totals(SILENCE_S + 0.5).jobs == 1
    assert backlogs.totals(SILENCE_S + 1.5) == BacklogTotals()


def test_what_has_come_is_told_by_a_counter_that_grows():
    backlogs = Backlogs()
    assert backlogs.hear(said("a", 1, done_tokens=500), 0.0) == 0
    assert backlogs.hear(said("a", 4, done_tokens=800), 0.1) == 300
    assert backlogs.hear(said("a", 3, done_tokens=700), 0.2) is None


def test_what_was_asked_and_what_found_no_room_is_counted_for_ever():
    """A planner reads the counters at times of its own: an engine that leaves takes nothing back,
    and one that is new brings nothing of the past."""
    backlogs = Backlogs()
    backlogs.hear(said("a", 1, asked_tokens=500, overflow_tokens=900), 0.0)
    assert backlogs.totals(0.0) == BacklogTotals()
    backlogs.hear(said("a", 2, asked_tokens=600, overflow_tokens=1000), 1.0)
    backlogs.hear(said("b", 1, asked_tokens=7), 1.0)
    backlogs.hear(said("b", 2, asked_tokens=57, leaving=True), 2.0)
    now = 2.0 + 2 * SILENCE_S
    assert backlogs.engines(now) == 0
    totals = backlogs.totals(now)
    assert (totals.asked_tokens, totals.overflow_tokens, totals.tokens) == (150, 100, 0)
    assert (totals + totals).overflow_tokens == 200


@pytest.mark.parametrize(
    ("engines", "period_s"), [(1, 0.02), (16, 0.02), (64, 0.064), (512, 0.512), (5000, 1.0)]
)
def test_the_more_engines_the_rarer_each_ones_messages(engines: int, period_s: float):
    assert notice_period_s(engines) == pytest.approx(period_s)
    assert notice_period_s(engines) < SILENCE_S / 2, "one lost message is no silence"


def test_who_waits_for_whom():
    totals = BacklogTotals(
        3, {Lane.URGENT: 1, Lane.SHORT: 10, Lane.LONG: 100}, claimed_jobs=1, claimed_tokens=1000
    )
    assert totals.tokens == 1111
    assert [totals.ahead_of(lane) for lane in Lane] == [1, 11, 1111]
    assert wait_s(totals, Lane.LONG, rate=100.0, workers=2) == pytest.approx(5.555)
    assert wait_s(totals, Lane.LONG, rate=None, workers=2) is None
    assert wait_s(totals, Lane.LONG, rate=100.0, workers=0) is None


def test_a_worker_is_as_fast_as_while_it_had_work():
    rate = DrainRate()
    assert rate.tokens_per_s(0.0) is None
    rate.moved(0.0, done_tokens=0, claimed_jobs=2, workers=1)
    rate.moved(1.0, done_tokens=500, claimed_jobs=1, workers=1)
    rate.moved(2.0, done_tokens=500, claimed_jobs=0, workers=1)
    assert rate.tokens_per_s(2.0) == pytest.approx(500)
    rate.moved(30.0, done_tokens=0, claimed_jobs=4, workers=4)
    rate.moved(31.0, done_tokens=2000, claimed_jobs=0, workers=4)
    assert rate.tokens_per_s(31.0) == pytest.approx(500)


def test_a_rate_that_nothing_confirms_is_forgotten():
    rate = DrainRate()
    rate.moved(0.0, done_tokens=0, claimed_jobs=1, workers=1)
    rate.moved(1.0, done_tokens=10, claimed_jobs=0, workers=1)
    assert rate.tokens_per_s(60.0) == pytest.approx(10)
    assert rate.tokens_per_s(61.5) is None
