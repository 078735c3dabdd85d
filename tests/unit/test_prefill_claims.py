"""The claim of a prefill worker: asked for, renewed while it works, refused, run out."""

import asyncio
from typing import Any

import pytest

from dynamo_lite.disagg.attempts.ledger import LEAVING_S
from dynamo_lite.disagg.prefill.attempt import RENEWAL
from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import BrokerUnavailable
from dynamo_lite.protocol.prefill import ClaimRefused, Held
from tests.builders import ENGINE, NAMESPACE, eventually, prefill_job
from tests.twins.servers import MemoryMessaging
from tests.unit.prefill_rig import CLAIM_S, Rig, working
from tests.unit.virtual import virtual

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

REFUSED = ClaimRefused(reason="withdrawn")


# The first claim


@virtual
async def test_a_claim_that_is_never_answered_is_given_back():
    """It may hold, and would block others."""
    async with working() as rig:
        rig.answers = [None] * 9
        await rig.push(prefill_job())
        await rig.acked()
        assert rig.engine.attempts == [] and 1 < len(rig.claims) < 9
        assert rig.told == [("a1", "abandoned")]
        assert rig.done[0].claim == rig.claims[0].claim
        # An answer that comes too late opens nothing: the cell belongs to other claims.
        rig.answers = []
        await rig.push(prefill_job("a2"))
        await rig.acked(2)
        assert rig.engine.attempts == rig.engine.written == ["a2"]


async def test_a_claim_whose_answer_a_lost_connection_swallows_is_given_back(monkeypatch):
    """Else it would hold for a worker that does not know."""
    request = MemoryMessaging.request

    async def loses_answer(self: MemoryMessaging, *args: Any, **kwargs: Any) -> bytes:
        await request(self, *args, **kwargs)
        raise BrokerUnavailable("the connection broke")

    async with working() as rig:
        monkeypatch.setattr(MemoryMessaging, "request", loses_answer)
        await rig.push(prefill_job())
        await rig.acked()
        assert len({claim.claim for claim in rig.claims}) == 1
        assert rig.told == [("a1", "abandoned")]
        assert rig.done[0].claim == rig.claims[0].claim
        assert rig.engine.attempts == []


@virtual
async def test_a_job_whose_engine_does_not_listen_is_handed_back_soon():
    async with working(serving=False) as rig:
        await rig.push(prefill_job())
        async with asyncio.timeout(1):
            await rig.acked()
        assert rig.told == [("a1", "abandoned")]
        assert (rig.engine.attempts, rig.counted("abandoned")) == ([], 1)


@pytest.mark.parametrize("answer", [REFUSED, b"", b"\xff", b"\x80"])
async def test_a_job_is_not_computed_without_a_claim(answer: ClaimRefused | bytes):
    """The end is reported: an answer before the refusal may have been lost."""
    async with working() as rig:
        rig.answers = [answer]
        await rig.push(prefill_job())
        await rig.acked()
        assert rig.engine.attempts == []
        assert rig.told == [("a1", "abandoned")] and rig.done[0].claim == rig.claims[0].claim
        assert rig.counted("refused") == 1
        assert await rig.total() == 0


# Renewals


@virtual
async def test_a_long_job_keeps_its_claim():
    async with working() as rig:
        await rig.begin(prefill_job())
        for _ in range(40):
            await asyncio.sleep(0.5)
            assert rig.engine.open("a1")
            last, _ = rig.heard[-1]
            assert rig.engine.until("a1") == pytest.approx(last + CLAIM_S, abs=1e-3)
        assert len(rig.claims) == pytest.approx(20.0 / (CLAIM_S * RENEWAL), abs=2)
        assert {claim.claim for claim in rig.claims} == {1}
        rig.engine.ends["a1"].set_result("written")
        await rig.acked()
        count = len(rig.claims)
        await asyncio.sleep(10)
        assert len(rig.claims) == count, "nothing is renewed after the end"
        assert rig.told == [("a1", "written")]


@virtual
async def test_an_engine_says_for_how_long_its_claims_hold():
    async with working() as rig:
        rig.answers = [Held(for_s=0.6)] * 100
        await rig.begin(prefill_job())
        await asyncio.sleep(2.0)
        assert len(rig.claims) == pytest.approx(2.0 / (0.6 * RENEWAL), abs=2)
        assert rig.engine.open("a1")
        rig.engine.ends["a1"].set_result("written")


@virtual
@pytest.mark.parametrize("answer", [REFUSED, b"", b"\xff"])
async def test_a_refused_renewal_stops_the_writes_and_the_computing(answer: ClaimRefused | bytes):
    async with working() as rig:
        await rig.begin(prefill_job())
        rig.engine.drains = False
        rig.answers = [answer]
        await eventually(lambda: rig.engine.abandoned)
        assert not rig.engine.open("a1") and rig.engine.until("a1") == 0.0
        # Its writes are in flight: nothing is reported yet, and the claim is not renewed any more.
        count = len(rig.claims)
        await asyncio.sleep(5)
        assert (rig.done, rig.queue.acked, len(rig.claims)) == ([], [], count)
        assert not rig.engine.open("a1")
        rig.engine.ends["a1"].set_result("abandoned")
        await rig.acked()
        assert rig.engine.abandoned == ["a1"]
        assert rig.told == [("a1", "abandoned")] and rig.done[0].claim == 1
        assert rig.counted("abandoned") == 1


async def silent(rig: Rig, how: str) -> None:
    if how == "no answer":
        rig.answers = [None] * 1000
    elif how == "no broker":
        rig.messaging.set_connected(False)
    else:
        rig.messaging._served.pop(names.claim_subject(NAMESPACE, ENGINE))


@virtual
@pytest.mark.parametrize("how", ["no answer", "no broker", "nobody listens"])
async def test_a_claim_that_is_not_renewed_runs_out_and_its_job_is_abandoned(how: str):
    async with working() as rig:
        served = dict(rig.messaging._served)
        await rig.begin(prefill_job())
        await asyncio.sleep(5.2)
        until = rig.engine.until("a1")
        await silent(rig, how)
        while rig.boottime() < until:
            assert rig.engine.until("a1") == until and rig.engine.abandoned == []
            await asyncio.sleep(0.01)
        assert not rig.engine.open("a1")
        await eventually(lambda: rig.engine.abandoned, within_s=0.1)
        rig.messaging._served |= served
        rig.messaging.set_connected(True)
        await rig.acked()
        assert rig.told == [("a1", "abandoned")]
        assert not rig.engine.open("a1")


@virtual
async def test_a_worker_that_stood_still_for_longer_than_its_claim_abandons_the_job():
    """Its decode engine may have given the blocks to others: nothing is written on."""
    async with working() as rig:
        await rig.begin(prefill_job())
        until = rig.engine.until("a1")
        rig.stalled_s = 60.0
        assert not rig.engine.open("a1")
        await eventually(lambda: rig.engine.abandoned)
        assert not rig.engine.open("a1") and rig.engine.until("a1") <= until
        await rig.acked()
        assert rig.told == [("a1", "abandoned")]


@virtual
async def test_an_answer_to_a_worker_that_stood_still_opens_nothing_longer_than_it_says():
    async with working() as rig:
        await rig.begin(prefill_job())

        async def stall() -> None:
            rig.stalled_s += 2.0

        rig.on_claim = stall
        await eventually(lambda: len(rig.claims) == 2)
        asked_at, _ = rig.heard[-1]
        await eventually(lambda: rig.engine.until("a1") > asked_at + 1)
        assert rig.engine.until("a1") <= asked_at + CLAIM_S
        rig.on_claim = None
        rig.engine.ends["a1"].set_result("written")


async def test_a_worker_that_is_ended_renews_nothing_and_leaves_its_cell_shut():
    async with working() as rig:
        await rig.begin(prefill_job())
        rig.tasks[0].cancel()
        await asyncio.gather(rig.tasks.pop(), return_exceptions=True)
        assert not rig.engine.open("a1")
        assert rig.engine.ends["a1"].cancelled() and rig.done == []


# Leaving


@virtual
async def test_a_leaving_worker_goes_on_renewing_and_finishes_what_it_has_begun():
    async with working(runners=2) as rig:
        for attempt in ("a1", "a2"):
            await rig.begin(prefill_job(attempt))
        await rig.jobs.stop()
        count, left_at = len(rig.claims), rig.boottime()
        await asyncio.sleep(LEAVING_S)
        assert {claim.attempt for claim in rig.claims[count:]} == {"a1", "a2"}
        for _ in range(20):
            await asyncio.sleep(0.5)
            assert rig.engine.open("a1") and rig.engine.open("a2")
        assert rig.boottime() - left_at > 2 * CLAIM_S
        for attempt in ("a1", "a2"):
            rig.engine.ends[attempt].set_result("written")
        await rig.acked(2)
        assert sorted(rig.told) == [("a1", "written"), ("a2", "written")]
        assert rig.jobs.idle.is_set()
