"""A decode rank counts what was written under the claim of its attempt, and nothing else."""

import pytest

from dynamo_lite.disagg.counters import DROPPED, LATE
from dynamo_lite.disagg.decode.rank import DecodeRank
from dynamo_lite.disagg.messages import DecodeStep
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.prefill import Written
from dynamo_lite.protocol.records import RankMetadata
from tests.twins.mover import MemoryFabric, MemoryMover

UNCLAIMED = f"{DROPPED}/unclaimed"
NOTHING: tuple[set[str], set[str]] = set(), set()


class Ranked:
    """A decode rank that gets notifications as they come."""

    def __init__(self) -> None:
        self.mover = MemoryMover(MemoryFabric(), "d")
        own = RankMetadata(agent=b"", memory="DRAM", device=0, regions=())
        self.rank = DecodeRank(self.mover, own)

    def step(self, *notices: Written, **step) -> tuple[set[str], set[str]]:
        self.mover.inbox += [encode(notice) for notice in notices]
        self.rank.step(DecodeStep(**{"poll": True, **step}))
        results = self.rank.results()
        return results.received, results.lost

    def counted(self, name: str) -> int:
        return self.rank.stats.data.get(name, 0)


def commit(claim: int, **fields) -> Written:
    usual = {"attempt": "a1", "rank": 0, "num_blocks": 0, "last": True}
    return Written(claim=claim, **(usual | fields))


@pytest.fixture
def ranked() -> Ranked:
    return Ranked()


def test_a_commit_counts_under_the_claim_of_its_attempt_only(ranked: Ranked):
    assert ranked.step(expect={"a1": "r1"}) == NOTHING
    assert ranked.step(commit(0), commit(4)) == NOTHING
    assert ranked.step(commit(6), claims={"a1": 5}) == NOTHING
    assert ranked.step(commit(5)) == ({"r1"}, set())
    assert ranked.counted(UNCLAIMED) == 3


@pytest.mark.parametrize("claims", [{}, {"a1": 0}])
def test_without_a_claim_nothing_counts(ranked: Ranked, claims: dict[str, int]):
    """0 stands for no claim, also if the step or a writer names it."""
    ranked.step(expect={"a1": "r1"}, blocks={"a1": (1, 2)}, claims=claims)
    landed = commit(0, num_blocks=1, last=False)
    assert ranked.step(landed, commit(0, num_blocks=2)) == NOTHING
    assert ranked.step(give_up=[("a1", "r1")]) == (set(), {"r1"})
    report = ranked.rank.report()
    assert report is not None and report.landed == {"r1": 0}


def test_a_commit_that_comes_before_its_claim_is_known_counts(ranked: Ranked):
    assert ranked.step(commit(5)) == NOTHING
    assert ranked.step(commit(5), expect={"a1": "r1"}) == NOTHING
    assert ranked.step(claims={"a1": 5}) == ({"r1"}, set())
    assert ranked.counted(UNCLAIMED) == 0


def test_commits_of_two_claims_do_not_complete_each_other(ranked: Ranked):
    ranked.step(expect={"a1": "r1"}, claims={"a1": 6})
    assert ranked.step(commit(5, writers=2)) == NOTHING
    assert ranked.step(commit(6, writers=2, rank=1)) == NOTHING
    assert ranked.step(commit(5, writers=2, rank=1)) == NOTHING
    assert ranked.step(commit(6, writers=2)) == ({"r1"}, set())
    assert ranked.counted(UNCLAIMED) == 2


def test_blocks_that_landed_under_another_claim_do_not_count(ranked: Ranked):
    ranked.step(expect={"a1": "r1"}, blocks={"a1": (1, 2)}, claims={"a1": 5})
    stale = commit(4, first=0, num_blocks=1, last=False)
    assert ranked.step(stale, give_up=[("a1", "r1")]) == (set(), {"r1"})
    report = ranked.rank.report()
    assert report is not None and report.landed == {"r1": 0}
    assert ranked.counted(UNCLAIMED) == 1


def test_what_is_replayed_after_the_end_is_late(ranked: Ranked):
    ranked.step(expect={"a1": "r1"}, claims={"a1": 5})
    assert ranked.step(commit(5), commit(5)) == ({"r1"}, set())
    assert ranked.step(commit(5), commit(4)) == NOTHING
    assert (ranked.counted(LATE), ranked.counted(UNCLAIMED)) == (2, 0)


def test_notifications_of_many_other_claims_do_not_hide_its_own(ranked: Ranked):
    ranked.step(expect={"a1": "r1"}, claims={"a1": 5})
    ranked.step(*(commit(100 + i, writers=2) for i in range(100)))
    assert ranked.step(commit(5)) == ({"r1"}, set())
    assert ranked.counted(UNCLAIMED) == 100


@pytest.mark.parametrize("claim", [100, 275, 276, 1299])
def test_what_comes_before_a_claim_is_bounded(ranked: Ranked, claim: int):
    ranked.step(expect={"a1": "r1"})
    ranked.step(*(commit(100 + i) for i in range(1200)))
    # The last 1,024 are known.
    known = claim >= 276
    assert ranked.step(claims={"a1": claim}) == (({"r1"}, set()) if known else NOTHING)
    assert not known or ranked.counted(UNCLAIMED) == 1023
