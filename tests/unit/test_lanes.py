"""Which jobs go first, and that no job is passed over forever."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_lite.disagg.decision.lanes import PATIENCE, Lane, LaneTurns, granted_priority, lane_of
from dynamo_lite.disagg.queue.base import QueueConfig


@pytest.mark.parametrize(
    ("tokens", "priority", "lane"),
    [(100, 0, Lane.SHORT), (101, 0, Lane.LONG), (101, -1, Lane.URGENT), (1, 1, Lane.LONG)],
)
def test_a_job_waits_by_its_length_unless_its_priority_says_otherwise(
    tokens: int, priority: int, lane: Lane
):
    config = QueueConfig(short_length=100)
    assert lane_of(tokens, priority, 100) is config.lane_of(tokens, priority) is lane


@given(st.lists(st.sets(st.sampled_from(Lane), min_size=1), min_size=1, max_size=60))
def test_a_lane_with_jobs_is_passed_over_a_few_times_only(rounds: list[set[Lane]]):
    """rounds: the lanes that have jobs at each pull."""
    turns, passed = LaneTurns(), dict.fromkeys(Lane, 0)
    for waiting in rounds:
        order = turns.order(tuple(Lane))
        assert sorted(order, key=list(Lane).index) == list(Lane)
        taken = next(lane for lane in order if lane in waiting)
        turns.took(taken, order)
        for lane in Lane:
            passed[lane] = passed[lane] + 1 if lane in waiting and lane is not taken else 0
            # While one that waits as long is served another may wait one turn more.
            assert passed[lane] <= PATIENCE + 1


def test_what_clients_are_granted():
    asked = (-(2**63), -1, 0, 7)
    assert [granted_priority(p, "ignore") for p in asked] == [0, 0, 0, 0]
    assert [granted_priority(p, "lower-only") for p in asked] == [0, 0, 0, 7]
    assert [granted_priority(p, "any") for p in asked] == list(asked)
    assert [granted_priority(p, "any") for p in (-(2**80), 2**80)] == [-(2**63), 2**63 - 1]
