"""Who is removed, and when it may be killed."""

import random
from typing import Any

import pytest

from dynamo_lite.planner.policy.drain import Victim, WorkerSeen, danger, victim
from dynamo_lite.planner.policy.inputs import Role
from tests.builders import endpoint_record


def candidate(
    lease_id: int, in_flight: int | None = 0, *, serves: bool = True, started_at: float = 0.0
) -> WorkerSeen:
    record = endpoint_record(lease_id, started_at=started_at)
    state = "ready" if serves else "unwell"
    return WorkerSeen(record=record, state=state, in_flight=in_flight)


def chosen(*candidates: WorkerSeen, **options: Any) -> int | None:
    found = victim(candidates, **options)
    return None if found.record is None else found.record.lease_id


def test_the_least_busy_and_of_equal_ones_the_youngest():
    found = victim([candidate(1, 3), candidate(2, 1), candidate(3, 2)])
    second = endpoint_record(2, started_at=0.0)
    assert found == Victim(record=second, reason="least busy of 3: 1 in flight")
    found = victim([candidate(1, started_at=5.0), candidate(2, started_at=9.0), candidate(3, 1)])
    reason = "least busy of 3: 0 in flight"
    assert found == Victim(record=endpoint_record(2, started_at=9.0), reason=reason)


def test_the_last_one_that_can_work_stays():
    assert chosen(candidate(1)) is None
    assert chosen(candidate(1), force=True) == 1
    # The broken one goes, and the other one stays.
    assert chosen(candidate(1, 5), candidate(2, serves=False)) == 2
    assert chosen(candidate(1, serves=False), candidate(2, serves=False)) is None
    assert victim([], force=True).record is None


def test_those_that_may_not_be_chosen_count_among_those_that_stay():
    idle, busy, broken = candidate(1), candidate(2, 5), candidate(3, serves=False)
    assert chosen(idle, busy, among={2}) == 2
    assert chosen(busy, broken, among={2}) is None
    assert chosen(busy, broken, among={2}, force=True) == 2
    assert chosen(idle, busy, among=()) is None


def test_the_choice_does_not_depend_on_the_order_and_is_the_least_busy():
    rng = random.Random(3)
    for _ in range(300):
        some = [
            candidate(
                i,
                rng.choice([None, 0, rng.randint(1, 3)]),
                serves=rng.random() < 0.7,
                started_at=float(rng.randint(0, 2)),
            )
            for i in range(1, rng.randint(2, 8))
        ]
        found = victim(some)
        assert found == victim(rng.sample(some, len(some)))
        if found.record is not None:
            [gone] = [one for one in some if one.lease_id == found.record.lease_id]
            assert any(one.serves for one in some if one is not gone)
            others = [one for one in some if one.serves == gone.serves]
            assert gone.serves is all(one.serves for one in some)
            busy = [(one.in_flight is None, one.in_flight or 0) for one in (gone, *others)]
            assert busy[0] == min(busy)
        else:
            assert sum(one.serves for one in some) <= 1


# safe

P, D = 7, 5
LEASES = {Role.PREFILL: P, Role.DECODE: D}
#: It was idle at 10; the decode worker reported at 11 that it waits for no writer.
NOBODY = {D: (frozenset[int](), 11.0)}


def judged(
    role: Role, writers: Any = NOBODY, *, listed: bool = False, in_flight: int | None = 0
) -> str:
    return danger(role, LEASES[role], writers, listed=listed, in_flight=in_flight, idle_at=10.0)


@pytest.mark.parametrize("role", Role)
def test_safe_only_when_nothing_is_missing(role: Role):
    assert judged(role) == ""
    assert judged(role, listed=True) == "it is still listed: it may get work"
    assert judged(role, in_flight=2)
    assert judged(role, in_flight=None)
    assert (judged(role, {}) == "") is (role is Role.PREFILL)
    assert judged(role, {D: None})
    # What was said before it was idle may have changed since.
    assert judged(role, {D: (frozenset(), 9.0)})


def test_idle_alone_is_not_safe():
    """A write may still be under way into blocks that would be used again."""
    found = judged(Role.PREFILL, {D: (frozenset({P}), 11.0), 6: (frozenset(), 11.0)})
    assert found == "attempts that it may write: of 5"
    assert judged(Role.PREFILL, {D: (frozenset({8}), 11.0)}) == ""
    found = judged(Role.DECODE, {D: (frozenset({P, 8}), 11.0)})
    assert found == "2 writers may still write into its blocks"
