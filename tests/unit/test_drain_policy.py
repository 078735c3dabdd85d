"""Who is removed, when it may be killed, and which of its requests move."""

import math
import random
from itertools import product
from typing import Any

import pytest

from dynamo_lite.policy.scaling.drain import (
    DrainCandidate,
    Finish,
    Leaving,
    Move,
    NoVictim,
    Pace,
    RunningRequest,
    Safe,
    Unsafe,
    Victim,
    busy_s,
    cost,
    move_or_finish,
    safe,
    victim,
    written_s,
)
from dynamo_lite.policy.scaling.inputs import Role
from dynamo_lite.policy.scaling.request_pace import RequestPace


def candidate(lease_id: int, busy: float | None = 0.0, **changes: Any) -> DrainCandidate:
    return DrainCandidate(lease_id=lease_id, busy_s=busy, **changes)


def chosen(*candidates: DrainCandidate, force: bool = False) -> int | None:
    found = victim(candidates, force=force)
    return found.lease_id if isinstance(found, Victim) else None


def test_the_cheapest_per_device_and_of_equal_ones_the_youngest():
    assert chosen(candidate(1, 3.0), candidate(2, 1.0, cache_s=1.0), candidate(3, 2.5)) == 2
    assert chosen(candidate(1, 3.0), candidate(2, 8.0, devices=4)) == 2
    assert chosen(candidate(1, started_at=5.0), candidate(2, started_at=9.0)) == 2
    found = victim([candidate(1, started_at=5.0), candidate(2, started_at=9.0)])
    assert isinstance(found, Victim) and found.reason == "youngest of the cheapest of 2"


def test_one_that_cannot_work_goes_first_and_an_unknown_one_last():
    assert chosen(candidate(1), candidate(2, 9.0, serves=False, started_at=-1.0)) == 2
    assert chosen(candidate(1, 0.1), candidate(2, 9.0, serves=False)) == 2
    assert chosen(candidate(1, None), candidate(2, 1e9)) == 2
    assert cost(candidate(1, None)).total_s == math.inf


def test_the_last_one_that_can_work_stays():
    assert chosen(candidate(1)) is None
    assert chosen(candidate(1), force=True) == 1
    # The broken one goes, and the other one stays.
    assert chosen(candidate(1, 5.0), candidate(2, serves=False)) == 2
    assert chosen(candidate(1, serves=False), candidate(2, serves=False)) is None
    assert isinstance(victim([], force=True), NoVictim)


def test_the_choice_does_not_depend_on_the_order_and_costs_least():
    rng = random.Random(3)
    for _ in range(300):
        some = [
            candidate(
                i,
                rng.choice([None, 0.0, rng.random()]),
                cache_s=rng.choice([0.0, rng.random()]),
                devices=rng.randint(1, 4),
                serves=rng.random() < 0.7,
                started_at=float(rng.randint(0, 2)),
            )
            for i in range(1, rng.randint(2, 8))
        ]
        found = victim(some)
        assert found == victim(rng.sample(some, len(some)))
        if isinstance(found, Victim):
            assert found.cost.total_s == min(cost(one).total_s for one in some)
            assert any(one.serves for one in some if one.lease_id != found.lease_id)
        else:
            assert sum(one.serves for one in some) <= 1


# safe

P, D = 7, 5
#: It was idle at 10; the decode worker reported at 11 that it waits for no writer.
IDLE_P = Leaving(
    role=Role.PREFILL, lease_id=P, listed=False, unlisted_at=8, in_flight=0, idle_at=10
)
IDLE_D = Leaving(role=Role.DECODE, lease_id=D, listed=False, unlisted_at=8, in_flight=0, idle_at=10)
NOBODY = {D: (frozenset[int](), 11.0)}


def changed(leaving: Leaving, **changes: Any) -> Leaving:
    fields = {name: getattr(leaving, name) for name in leaving.__dataclass_fields__}
    return Leaving(**{**fields, **changes})


def judged(leaving: Leaving, writers: Any = NOBODY, now: float = 12.0) -> Safe | Unsafe:
    return safe(leaving, writers, now=now, fence_s=60.0)


def test_the_last_write_of_a_worker_that_is_cut_off_lands_within_two_times_to_live():
    assert written_s(grace_s=10.0, lease_ttl_s=30.0) == 60.0
    assert written_s(grace_s=300.0, lease_ttl_s=30.0) == 330.0


@pytest.mark.parametrize("leaving", [IDLE_P, IDLE_D])
def test_safe_only_when_nothing_is_missing(leaving: Leaving):
    assert isinstance(judged(leaving), Safe)
    assert judged(changed(leaving, listed=True)) == Unsafe(
        reason="it is still listed: it may get work"
    )
    assert isinstance(judged(changed(leaving, in_flight=2, idle_at=None)), Unsafe)
    assert isinstance(judged(changed(leaving, in_flight=None, idle_at=None)), Unsafe)
    assert isinstance(judged(leaving, {}), Safe if leaving.role is Role.PREFILL else Unsafe)
    assert isinstance(judged(leaving, {D: None}), Unsafe)
    # What was said before it was idle may have changed since.
    assert isinstance(judged(leaving, {D: (frozenset(), 9.0)}), Unsafe)
    assert isinstance(judged(changed(leaving, ended=True, listed=True)), Safe)


def test_idle_alone_is_not_safe():
    """A write may still be under way into blocks that would be used again."""
    found = judged(IDLE_P, {D: (frozenset({P}), 11.0), 6: (frozenset(), 11.0)})
    assert found == Unsafe(reason="attempts that it may write: of 5")
    assert isinstance(judged(IDLE_P, {D: (frozenset({8}), 11.0)}), Safe)
    found = judged(IDLE_D, {D: (frozenset({P, 8}), 11.0)})
    assert found == Unsafe(reason="2 writers may still write into its blocks")


def test_a_closed_fence_makes_a_prefill_worker_safe_and_no_decode_worker():
    busy = changed(IDLE_P, in_flight=1, idle_at=None)
    assert isinstance(judged(busy, now=68.0), Unsafe)
    assert isinstance(judged(busy, now=68.1), Safe)
    busy = changed(IDLE_D, in_flight=1, idle_at=None)
    assert isinstance(judged(busy, now=1e6), Unsafe)


def test_more_knowledge_of_writers_never_makes_it_safe():
    """Safe with some ledgers implies safe with fewer names in them."""
    for leaving, first, second in product((IDLE_P, IDLE_D), (set(), {P}, {8}), (set(), {P})):
        writers = {D: (frozenset(first), 11.0), 6: (frozenset(second), 11.0)}
        if isinstance(judged(leaving, writers), Safe):
            assert P not in first | second if leaving.role is Role.PREFILL else not first


# moves

PACE = Pace(token_s=0.1, prefill_tokens_per_s=1000.0, output_tokens=200)


def running(**changes: Any) -> RunningRequest:
    fields = {"prompt_tokens": 500, "output_tokens": 20, "limit_tokens": 100, "how": "continue"}
    return RunningRequest(**{**fields, **changes})


def test_a_request_moves_where_that_is_cheaper_than_its_end():
    found = move_or_finish(running(), PACE)
    assert isinstance(found, Move)
    assert found.cost_s == pytest.approx(0.52)
    assert found.saves_s == pytest.approx(8.0 - 0.52)
    # A replay generates again what the client has: twenty tokens, two seconds.
    found = move_or_finish(running(how="replay"), PACE)
    assert isinstance(found, Move) and found.cost_s == pytest.approx(2.5)
    slow = Pace(token_s=0.1, prefill_tokens_per_s=1000.0, prefill_fixed_s=7.0, output_tokens=200)
    found = move_or_finish(running(), slow)
    assert isinstance(found, Move) and found.cost_s == pytest.approx(7.52)
    assert isinstance(move_or_finish(running(output_tokens=97), PACE), Finish)
    assert isinstance(move_or_finish(running(prompt_tokens=9000), PACE), Finish)
    assert isinstance(move_or_finish(running(how="replay", output_tokens=60), PACE), Finish)
    assert isinstance(move_or_finish(running(how="stay"), PACE), Finish)


def test_its_own_pace_counts_and_the_usual_length():
    assert isinstance(move_or_finish(running(token_s=0.001), PACE), Finish)
    found = move_or_finish(running(limit_tokens=None), PACE)
    assert isinstance(found, Move) and found.saves_s == pytest.approx(20.0 - 0.52)
    found = move_or_finish(running(limit_tokens=None, how="stay"), PACE)
    assert found.cost_s == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("request_", "pace"),
    [
        (running(), Pace()),
        (running(), Pace(token_s=0.1)),
        (running(limit_tokens=None), Pace(token_s=0.1, prefill_tokens_per_s=1000.0)),
    ],
)
def test_what_was_not_measured_moves_nothing(request_: RunningRequest, pace: Pace):
    assert isinstance(move_or_finish(request_, pace), Finish)


def test_busy_is_the_sum_of_the_cheaper_ways():
    two = [running(), running(output_tokens=97)]
    assert busy_s(two, PACE) == pytest.approx(0.52 + 0.3)
    assert busy_s([], Pace()) == 0.0
    assert busy_s([running(), running(limit_tokens=None)], Pace(token_s=0.1)) is None


def test_paces_are_measured():
    measured = RequestPace()
    assert measured.pace == Pace()
    for tokens in (30, 30, 31):
        measured.first(tokens, 0.6)
    # One length: all its time is charged to its tokens.
    assert measured.pace.prefill_tokens_per_s == pytest.approx(50, rel=0.02)
    assert measured.pace.prefill_fixed_s == pytest.approx(0, abs=1e-9)
    line = RequestPace()
    for tokens in (30, 800, 100, 2000):
        line.first(tokens, 0.5 + tokens / 1000)
    assert line.pace.prefill_tokens_per_s == pytest.approx(1000)
    assert line.pace.prefill_fixed_s == pytest.approx(0.5)
    for length in range(1, 8):
        line.ended(length, length - 1, 0.1 * (length - 1))
    assert (line.pace.output_tokens, line.pace.token_s) == (None, pytest.approx(0.1))
    for length in range(8, 101):
        line.ended(length, length - 1, 0.1 * (length - 1))
    assert line.pace.output_tokens == 91


def test_a_longer_prompt_is_never_estimated_cheaper():
    """Nor does noise give negative parts."""
    rng = random.Random(11)
    for _ in range(300):
        measured = RequestPace()
        for _ in range(rng.randint(1, 20)):
            measured.first(rng.choice([0, 1, 30, 500, rng.randint(0, 3000)]), rng.random())
        pace = measured.pace
        if pace.prefill_tokens_per_s is not None:
            assert pace.prefill_tokens_per_s > 0 and pace.prefill_fixed_s >= 0
