"""When a queued prompt is worth taking back: the policy."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_lite.policy.decision import steal_back
from dynamo_lite.policy.decision.steal_back import (
    PATIENCE_S,
    LeaveQueued,
    QueuedPrefill,
    StealReason,
    TakeBack,
    coin,
    look,
)

#: A prefill that was not claimed for a long time.
LATE = QueuedPrefill(attempt="a", local_s=0.4, waited_s=60.0, expected_s=1.0, ahead_s=0.0)
#: One with much before it.
BEHIND = replace(LATE, waited_s=0.1, ahead_s=100.0)


def looked(*queued: QueuedPrefill, streams: int = 0, here: bool = False, number: int = 1) -> Any:
    return look(queued, streams=streams, prefill_here=here, number=number)


def tossed(*queued: QueuedPrefill, looks: int = 200, **more: Any) -> Any:
    """The first verdict that was not left to chance."""
    verdicts = (looked(*queued, number=number, **more) for number in range(looks))
    left = LeaveQueued(StealReason.CHANCE)
    return next((verdict for verdict in verdicts if verdict != left), left)


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        (tossed(LATE), StealReason.OVERDUE),
        (tossed(BEHIND), StealReason.QUEUE_LONG),
        (tossed(LATE, here=True), StealReason.PREFILL_HERE),
        (tossed(replace(LATE, local_s=None)), StealReason.UNKNOWN),
        (tossed(replace(LATE, expected_s=None, ahead_s=None)), StealReason.UNKNOWN),
        # Nothing says that it should have been claimed by now.
        (tossed(replace(LATE, expected_s=None)), StealReason.REMOTE_CHEAPER),
        (tossed(replace(LATE, expected_s=60.0)), StealReason.REMOTE_CHEAPER),
        (tossed(replace(LATE, ahead_s=None)), StealReason.OVERDUE),
        (tossed(replace(BEHIND, expected_s=None)), StealReason.QUEUE_LONG),
        # 0.4 s here pauses 200 streams for 0.4 s each.
        (tossed(BEHIND, streams=200), StealReason.REMOTE_CHEAPER),
        (tossed(BEHIND, streams=100), StealReason.QUEUE_LONG),
    ],
)
def test_why(verdict: Any, reason: StealReason):
    assert verdict.reason is reason
    assert isinstance(verdict, TakeBack) == (reason.value in ("overdue", "queue_long"))


def test_a_job_is_not_overdue_for_a_blink():
    at = 1.0 + PATIENCE_S
    assert looked(replace(LATE, waited_s=at)).reason is StealReason.REMOTE_CHEAPER
    assert tossed(replace(LATE, waited_s=at + 0.4)).reason is StealReason.REMOTE_CHEAPER
    late = tossed(replace(LATE, waited_s=at + 0.6))
    assert late == TakeBack(StealReason.OVERDUE, "a", 0.5, pytest.approx(0.6))


def test_a_local_prefill_must_be_a_tenth_of_a_second_and_a_quarter_cheaper():
    for local_s, enough_s in ((0.01, 0.111), (0.4, 0.501), (2.0, 2.501)):
        just = replace(BEHIND, local_s=local_s, ahead_s=enough_s)
        assert tossed(just, looks=5000).reason is StealReason.QUEUE_LONG
        less = replace(just, ahead_s=enough_s - 0.002)
        assert tossed(less, looks=5000).reason is StealReason.REMOTE_CHEAPER


def test_the_one_that_gains_most_is_taken():
    shorter = replace(LATE, attempt="b", waited_s=50.0)
    longer = replace(LATE, attempt="c", local_s=20.0)
    assert tossed(shorter, longer, LATE).attempt == "a"
    assert tossed(shorter, longer, replace(LATE, local_s=None)).attempt == "b"


seconds = st.floats(0, 1000)
maybe = st.none() | seconds
QUEUED = st.builds(
    QueuedPrefill,
    attempt=st.text(min_size=1, max_size=8),
    local_s=maybe,
    waited_s=seconds,
    expected_s=maybe,
    ahead_s=maybe,
)
SOME = st.lists(QUEUED, min_size=1, max_size=5)


@given(SOME, st.integers(0, 100), st.booleans(), st.integers(0, 10**6))
def test_what_is_taken_saves_time_and_nothing_is_taken_beside_a_prefill(
    queued: list[QueuedPrefill], streams: int, here: bool, number: int
):
    verdict = looked(*queued, streams=streams, here=here, number=number)
    assert verdict == looked(*queued, streams=streams, here=here, number=number)
    if not isinstance(verdict, TakeBack):
        return
    assert not here
    found = [one for one in queued if one.attempt == verdict.attempt and one.local_s is not None]
    costs = [one.local_s * (1 + streams) for one in found if one.local_s is not None]
    assert any(verdict.target_s == cost + max(0.1, 0.25 * cost) for cost in costs)
    assert verdict.target_s < verdict.wait_s
    assert any(verdict.wait_s <= max(one.ahead_s or 0, one.waited_s) for one in found)


@given(SOME, st.integers(0, 50), st.integers(1, 50), st.integers(0, 10**6))
def test_more_streams_never_make_it_take_one_that_it_left(
    queued: list[QueuedPrefill], streams: int, more: int, number: int
):
    one = [queued[0]]
    if isinstance(looked(*one, streams=streams + more, number=number), TakeBack):
        assert isinstance(looked(*one, streams=streams, number=number), TakeBack)


@given(st.text(), st.integers(0, 2**63))
def test_a_coin_is_below_one_and_always_the_same(attempt: str, number: int):
    assert 0 <= coin(attempt, number) < 1
    assert coin(attempt, number) == coin(attempt, number)


def rounds(engines: int) -> list[int]:
    """How many act in each round of looks, 0.1 s apart, when workers stand still: each engine has
    one prompt, and all become worth taking back at the same moment."""
    queued, acted = {f"{i:032x}" for i in range(engines)}, list[int]()
    for number in range(1, 40):
        # The target is 0.5 s.
        late = replace(LATE, waited_s=1.0 + PATIENCE_S + 0.5 + 0.1 * number)
        acts = {
            attempt
            for attempt in queued
            if isinstance(looked(replace(late, attempt=attempt), number=number), TakeBack)
        }
        queued -= acts
        acted.append(len(acts))
    assert not queued
    return acted


def test_workers_that_go_on_soon_find_most_prompts_in_the_queue():
    """No look is that of a herd, and in the end all prompts are taken back."""
    acted = rounds(1000)
    assert 0 < max(acted) < 300
    assert sum(acted[:2]) < 500


def test_without_the_coin_all_act_in_the_first_look(monkeypatch: pytest.MonkeyPatch):
    """So the test before this one can fail."""
    monkeypatch.setattr(steal_back, "coin", lambda attempt, number: 0.0)
    assert rounds(1000)[0] == 1000


@pytest.mark.parametrize("wait_s", [0.6, 1.0, 2.0, 10.0])
def test_of_many_engines_that_see_the_same_as_many_act_as_are_too_many(wait_s: float):
    """Each has one attempt, and all have the same costs: a target of 0.5 s."""
    engines = 2000
    all_see = replace(BEHIND, ahead_s=wait_s)
    acts = sum(
        isinstance(looked(replace(all_see, attempt=f"{i:032x}"), number=7), TakeBack)
        for i in range(engines)
    )
    share = 1 - 0.5 / wait_s
    assert abs(acts / engines - share) < 4 * math.sqrt(share * (1 - share) / engines)
