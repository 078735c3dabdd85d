"""Which jobs go first, and that no job is passed over forever."""

import pytest

from dynamo_lite.disagg.decision.lanes import Lane, granted_priority, lane_of


@pytest.mark.parametrize(
    ("tokens", "priority", "lane"),
    [(100, 0, Lane.SHORT), (101, 0, Lane.LONG), (101, -1, Lane.URGENT), (1, 1, Lane.LONG)],
)
def test_a_job_waits_by_its_length_unless_its_priority_says_otherwise(
    tokens: int, priority: int, lane: Lane
):
    assert lane_of(tokens, priority, 100) is lane


def test_what_clients_are_granted():
    asked = (-(2**63), -1, 0, 7)
    assert [granted_priority(p, "ignore") for p in asked] == [0, 0, 0, 0]
    assert [granted_priority(p, "lower-only") for p in asked] == [0, 0, 0, 7]
    assert [granted_priority(p, "any") for p in asked] == list(asked)
    assert [granted_priority(p, "any") for p in (-(2**80), 2**80)] == [-(2**63), 2**63 - 1]
