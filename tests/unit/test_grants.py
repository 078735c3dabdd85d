"""Grants: who makes them, who believes them, and what is written without one."""

import msgspec
import pytest

from dynamo_lite.disagg.attempts.grants import GrantFault, GrantWanted, check_grant
from dynamo_lite.disagg.counters import DROPPED, LATE
from dynamo_lite.disagg.decode.rank import DecodeRank
from dynamo_lite.disagg.messages import DecodeStep
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import BadGrant
from dynamo_lite.protocol.grant import Grant, blocks_digest
from dynamo_lite.protocol.prefill import (
    Claim,
    ClaimRefused,
    Committed,
    FirstTokenSampling,
    FirstTokenWanted,
    Granted,
    Landed,
    decode_claim_reply,
)
from dynamo_lite.runtime.permits import PermitVerdict
from tests.builders import ENGINE, eventually, grant_for, prefill_job
from tests.twins.mover import MemoryFabric, MemoryMover
from tests.unit.decode_engine import TIMEOUT_S, WRITER, Decode
from tests.unit.prefill_rig import LEASE, Rig, working
from tests.unit.virtual import virtual

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

OTHER = 0xB
UNGRANTED = f"{DROPPED}/ungranted"


# The check


JOB = prefill_job()
CLAIM = Claim(attempt=JOB.attempt, writer_lease_id=LEASE, number=3)
RIGHT = grant_for(CLAIM, JOB)
WANTED = GrantWanted(
    engine_id=ENGINE,
    attempt=JOB.attempt,
    writer_lease_id=LEASE,
    claim=3,
    blocks=blocks_digest(JOB.block_ids, JOB.prefix_block_ids),
)


def fault(grant: Grant | None, *, authentic: bool = True, elapsed_s: float = 0.0):
    found = check_grant(grant, WANTED, authentic=authentic, elapsed_s=elapsed_s)
    return None if found is None else found.fault


def test_the_grant_of_this_claim_holds_until_it_expires():
    assert fault(RIGHT) is None
    assert fault(RIGHT, elapsed_s=29.999) is None
    assert fault(RIGHT, elapsed_s=30.0) is GrantFault.EXPIRED


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"id": 0}, GrantFault.MISSING),
        ({"engine_id": "e2"}, GrantFault.ENGINE),
        ({"attempt": "a2"}, GrantFault.ATTEMPT),
        ({"writer_lease_id": OTHER}, GrantFault.WRITER),
        ({"claim": 2}, GrantFault.CLAIM),
        ({"blocks": blocks_digest([9], [])}, GrantFault.BLOCKS),
        ({"blocks": b""}, GrantFault.BLOCKS),
        ({"for_s": 0.0}, GrantFault.EXPIRED),
    ],
)
def test_a_grant_for_anything_else_does_not(wrong, what):
    assert fault(msgspec.structs.replace(RIGHT, **wrong)) is what
    assert fault(RIGHT) is None


def test_neither_does_none_nor_one_without_a_seal_that_holds():
    assert fault(None) is GrantFault.MISSING
    assert fault(RIGHT, authentic=False) is GrantFault.SEAL


def test_a_digest_is_of_the_blocks_their_order_and_their_use():
    digests = [
        blocks_digest(*blocks)
        for blocks in (([1, 2], []), ([2, 1], []), ([1], [2]), ([], [1, 2]), ([1, 2, 2], []))
    ]
    assert len(set(digests)) == len(digests)
    assert blocks_digest([1, 2], [3]) == blocks_digest((1, 2), (3,))


# The writer


async def refused(rig: Rig, what: GrantFault, attempt: str = "a1") -> None:
    """The job was stopped, counted and answered, and nothing of it was written."""
    await eventually(lambda: attempt in [done.attempt for done in rig.done])
    done = next(done for done in rig.done if done.attempt == attempt)
    assert done.outcome == "failed" and done.detail.startswith(BadGrant.SAYS)
    assert rig.engine.written == []
    assert rig.engine.verdict(attempt) is PermitVerdict.REFUSED
    assert bad_grants(rig, what)


def bad_grants(rig: Rig, what: GrantFault) -> float | None:
    fault = {"fault": what.value}
    return rig.registry.get_sample_value("dynamo_lite_prefill_bad_grants_total", fault)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"engine_id": "e0"}, GrantFault.ENGINE),
        ({"claim": 7}, GrantFault.CLAIM),
        ({"blocks": blocks_digest([9], [])}, GrantFault.BLOCKS),
    ],
)
async def test_a_job_is_not_written_under_another_grant(wrong, what):
    async with working() as rig:
        rig.grant_changes = wrong
        await rig.push(prefill_job())
        await refused(rig, what)
        await rig.answered("ack")
        assert rig.counted("bad_grant") == 1
        # The worker continues.
        rig.grant_changes = {}
        await rig.push(prefill_job("a2"))
        await rig.answered("ack", "ack")
        assert rig.told[1:] == [("a2", "written")]


async def test_an_answer_without_a_grant_allows_nothing():
    """Such as that of a release before grants."""
    async with working() as rig:
        rig.verdicts = [Granted()]
        await rig.push(prefill_job())
        await refused(rig, GrantFault.MISSING)


async def test_a_grant_that_is_replayed_for_the_next_claim_of_the_same_attempt():
    """The first try ended, and the job came again."""
    async with working() as rig:
        first: list[Granted | ClaimRefused] = []

        async def keep() -> None:
            claim = rig.claims[-1]
            answer = Granted(grant=grant_for(claim, rig.pushed_jobs[claim.attempt]))
            first.append(answer)
            rig.verdicts = [first[0]]

        rig.on_claim = keep
        rig.engine.holds = True
        await rig.push(prefill_job())
        await eventually(lambda: "a1" in rig.engine.ends)
        await eventually(lambda: rig.engine.verdict("a1") is PermitVerdict.GRANTED)
        rig.engine.ends["a1"].set_result("abandoned")
        await rig.answered("ack")
        rig.engine.holds = False
        await rig.push(prefill_job())
        await rig.answered("ack", "ack")
        assert [claim.number for claim in rig.claims] == [1, 2]
        assert rig.done[-1].detail.startswith(BadGrant.SAYS)
        assert rig.engine.written == []


@virtual
async def test_no_write_starts_after_a_grant_has_expired():
    wanted = FirstTokenWanted(sampling=FirstTokenSampling(), last_token_id=10)
    async with working() as rig:
        rig.grant_changes = {"for_s": 0.2}
        # The token is given when the job may be written.
        rig.engine.holds, rig.engine.samples = True, 7
        await rig.push(prefill_job(first_token=wanted))
        await eventually(lambda: "a1" in rig.engine.ends)
        assert rig.counted("bad_grant") == 0 and bad_grants(rig, GrantFault.EXPIRED) is None
        await eventually(lambda: rig.engine.verdict("a1") is PermitVerdict.REFUSED)
        assert bad_grants(rig, GrantFault.EXPIRED) == 1
        rig.engine.ends["a1"].set_result("abandoned")
        await rig.answered("ack")
        assert rig.told == [("a1", "abandoned")]


async def test_an_answer_that_took_longer_than_its_grant_holds_is_not_used():
    async with working() as rig:

        async def pass_by() -> None:
            rig.boottime_s += 30.0

        rig.on_claim = pass_by
        await rig.push(prefill_job())
        await refused(rig, GrantFault.EXPIRED)


# The decode engine


async def answer(decode: Decode, claim: Claim) -> Granted | ClaimRefused:
    return decode_claim_reply(await decode.writer_events.on_claim(encode(claim)))


async def granted(decode: Decode, claim: Claim) -> Grant:
    reply = await answer(decode, claim)
    assert isinstance(reply, Granted) and reply.grant is not None
    return reply.grant


async def test_a_grant_says_who_may_write_what_and_for_how_long(decode: Decode):
    attempt = await decode.ask("r1", 10)
    job = await decode.job()
    decode.clock.now += 3.0
    claim = Claim(attempt=attempt, writer_lease_id=WRITER, number=4)
    grant = await granted(decode, claim)
    assert grant == grant_for(claim, job, id=grant.id, for_s=TIMEOUT_S - 3.0)
    assert grant.id > 0
    # The ranks learn it with the next step, once.
    assert decode.half.build_step().grants == {attempt: grant.id}
    assert decode.half.build_step().grants == {}
    decode.output("r1")
    await decode.done(attempt, number=4)
    decode.finish("r1")
    decode.half.build_step()
    decode.assert_clean()


async def test_a_claim_that_is_repeated_gets_the_same_grant_and_a_new_one_another(decode: Decode):
    attempt = await decode.ask()
    first = Claim(attempt=attempt, writer_lease_id=WRITER, number=1)
    ids = [(await granted(decode, first)).id for _ in range(2)]
    assert ids[0] == ids[1]
    again = await granted(decode, Claim(attempt=attempt, writer_lease_id=WRITER, number=2))
    assert again.id != ids[0]
    assert decode.half.build_step().grants == {attempt: again.id}
    stolen = Claim(attempt=attempt, writer_lease_id=OTHER, number=9)
    decode.writers.members = (WRITER, OTHER)
    assert isinstance(await answer(decode, stolen), ClaimRefused)
    assert decode.half.build_step().grants == {}


async def test_the_grant_of_an_attempt_that_has_ended_is_not_told(decode: Decode):
    attempt = await decode.ask()
    await granted(decode, Claim(attempt=attempt, writer_lease_id=WRITER))
    decode.finish("r1")
    assert decode.half.build_step().grants == {}


# The decode ranks


class Ranked:
    """A decode rank that gets notifications as they come."""

    def __init__(self) -> None:
        self.mover = MemoryMover(MemoryFabric(), "d")
        self.rank = DecodeRank(self.mover)

    def step(self, *notices: Committed | Landed, **step) -> tuple[set[str], set[str]]:
        self.mover.inbox += [encode(notice) for notice in notices]
        self.rank.step(DecodeStep(**{"poll": True, **step}))
        results = self.rank.results()
        return results.received, results.lost

    def counted(self, name: str) -> int:
        return self.rank.stats.data.get(name, 0)


NOTHING: tuple[set[str], set[str]] = set(), set()


def commit(grant: int, **fields) -> Committed:
    return Committed(**{"attempt": "a1", "rank": 0, "num_blocks": 0, "grant": grant, **fields})


@pytest.fixture
def ranked() -> Ranked:
    return Ranked()


def test_a_commit_counts_under_the_grant_of_its_attempt_only(ranked: Ranked):
    assert ranked.step(expect={"a1": "r1"}) == NOTHING
    assert ranked.step(commit(0), commit(4)) == NOTHING
    assert ranked.step(commit(6), grants={"a1": 5}) == NOTHING
    assert ranked.step(commit(5)) == ({"r1"}, set())
    assert ranked.counted(UNGRANTED) == 3


def test_a_commit_that_comes_before_its_grant_is_known_counts(ranked: Ranked):
    assert ranked.step(commit(5)) == NOTHING
    assert ranked.step(commit(5), expect={"a1": "r1"}) == NOTHING
    assert ranked.step(grants={"a1": 5}) == ({"r1"}, set())
    assert ranked.counted(UNGRANTED) == 0


def test_commits_of_two_grants_do_not_complete_each_other(ranked: Ranked):
    """Of an attempt that was granted to the same worker again."""
    ranked.step(expect={"a1": "r1"}, grants={"a1": 5})
    assert ranked.step(commit(5, writers=2)) == NOTHING
    assert ranked.step(commit(6, writers=2, rank=1), grants={"a1": 6}) == NOTHING
    assert ranked.step(commit(5, writers=2, rank=1)) == NOTHING
    assert ranked.step(commit(6, writers=2)) == ({"r1"}, set())
    assert ranked.counted(UNGRANTED) == 2


def test_blocks_that_landed_under_another_grant_do_not_count(ranked: Ranked):
    ranked.step(expect={"a1": "r1"}, blocks={"a1": (1, 2)}, grants={"a1": 5})
    stale = Landed(attempt="a1", rank=0, first=0, num_blocks=1, grant=4)
    assert ranked.step(stale, give_up=[("a1", "r1")]) == (set(), {"r1"})
    report = ranked.rank.report()
    assert report is not None and report.landed == {"r1": 0}
    assert ranked.counted(UNGRANTED) == 1


def test_what_is_replayed_after_the_end_is_late(ranked: Ranked):
    ranked.step(expect={"a1": "r1"}, grants={"a1": 5})
    assert ranked.step(commit(5), commit(5)) == ({"r1"}, set())
    assert ranked.step(commit(5), commit(4)) == NOTHING
    assert (ranked.counted(LATE), ranked.counted(UNGRANTED)) == (2, 0)


def test_notifications_of_many_other_grants_do_not_hide_its_own(ranked: Ranked):
    ranked.step(expect={"a1": "r1"}, grants={"a1": 5})
    ranked.step(*(commit(100 + i, writers=2) for i in range(100)))
    assert ranked.step(commit(5)) == ({"r1"}, set())
    assert ranked.counted(UNGRANTED) == 100


def test_the_memory_of_other_grants_is_bounded(ranked: Ranked):
    ranked.step(expect={"a1": "r1"})
    ranked.step(*(commit(100 + i) for i in range(100)))
    # Those of the last four are known.
    assert [ranked.step(grants={"a1": 100 + i}) for i in range(96)] == [NOTHING] * 96
    assert ranked.step(grants={"a1": 196}) == ({"r1"}, set())
    assert ranked.counted(UNGRANTED) == 99
