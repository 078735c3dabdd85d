"""A prefill worker's jobs, over the in-process twins and a scripted engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from dynamo_lite.disagg.prefill.job_waits import JobWaits
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import WIRE_VERSION, encode
from dynamo_lite.protocol.errors import BrokerUnavailable, IncompatiblePeer, NoResponders, Refused
from dynamo_lite.protocol.prefill import (
    CancelAttempt,
    Claim,
    ClaimRefused,
    FirstToken,
    FirstTokenSampling,
    FirstTokenWanted,
    decode_first_token,
)
from dynamo_lite.runtime.permits import PermitVerdict
from dynamo_lite.serve.services.prefill_worker import PrefillWorker
from tests.builders import ENGINE, NAMESPACE, eventually, prefill_job, process_spec
from tests.twins.queue import MemoryQueue
from tests.twins.servers import MemoryMessaging
from tests.unit import prefill_rig
from tests.unit.prefill_rig import LEASE, POOL, Rig, ScriptedLinks
from tests.unit.virtual import virtual

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


SHORT = JobWaits(retry_delay_s=0.01, report_s=0.1, broker_pause_s=0.01, left_delay_s=0.01)

working = partial(prefill_rig.working, waits=SHORT)


@asynccontextmanager
async def computing(**options: Any) -> AsyncIterator[Rig]:
    """The engine computes job a1 until the test ends it."""
    async with working(**options) as rig:
        rig.engine.holds = True
        await rig.push(prefill_job())
        await eventually(lambda: rig.engine.ends)
        yield rig


async def cancel(rig: Rig, attempt: str) -> None:
    subject = names.cancel_subject(NAMESPACE, LEASE)
    cancel = CancelAttempt(attempt=attempt, engine_id=ENGINE)
    await rig.messaging.publish(subject, encode(cancel))


# How jobs end


async def test_a_written_job_is_claimed_told_and_acknowledged():
    async with working() as rig:
        await rig.push(prefill_job())
        await rig.answered("ack")
        [claim] = rig.claims
        assert claim == Claim(attempt="a1", writer_lease_id=LEASE, held_s=claim.held_s, number=1)
        assert rig.told == [("a1", "written")]
        assert await rig.total() == 0
        assert rig.counted("written") == 1


async def test_the_first_token_goes_to_the_decode_worker_before_the_job_has_ended():
    wanted = FirstTokenWanted(sampling=FirstTokenSampling(), last_token_id=10, cached_tokens=4)
    got: list[bytes] = []

    async def take(payload: bytes) -> None:
        assert not rig.done
        got.append(payload)

    async with working() as rig:
        rig.engine.samples, rig.engine.holds = 7, True
        subject = names.first_token_subject(NAMESPACE, ENGINE)
        async with rig.messaging.serve(subject, take):
            await rig.push(prefill_job(first_token=wanted))
            await eventually(lambda: got)
            first = FirstToken(
                request_id="r-a1", attempt="a1", token_id=7, cached_tokens=4, writer_cached_tokens=8
            )
            assert decode_first_token(got[0]) == first
            rig.engine.ends["a1"].set_result("written")
            await rig.answered("ack")
        assert (len(got), rig.told) == (1, [("a1", "written")])


async def test_a_claim_whose_answer_a_lost_connection_swallows_is_taken_back(monkeypatch):
    """Else it would stay granted to a worker that does not know, until the deadline."""
    request = MemoryMessaging.request

    async def loses_answer(self: MemoryMessaging, *args: Any, **kwargs: Any) -> bytes:
        await request(self, *args, **kwargs)
        raise BrokerUnavailable("the connection broke")

    async with working() as rig:
        monkeypatch.setattr(MemoryMessaging, "request", loses_answer)
        await rig.push(prefill_job())
        await rig.answered("ack")
        assert len(rig.claims) == 1
        assert rig.told == [("a1", "abandoned")]
        assert rig.done[0].number == rig.claims[0].number


async def test_a_claim_that_is_answered_late_is_asked_for_again():
    late = asyncio.Event()
    async with working(waits=replace(SHORT, claim_s=0.2)) as rig:
        rig.on_claim = late.wait
        await rig.push(prefill_job())
        await eventually(lambda: len(rig.claims) == 2)
        late.set()
        await rig.answered("ack")
        await eventually(lambda: rig.done)
        assert rig.told == [("a1", "written")]
        assert rig.engine.attempts == ["a1"]


async def test_a_job_is_tried_again_when_the_store_is_away():
    async with working() as rig:
        rig.store.set_available(False)
        await rig.push(prefill_job())
        await eventually(lambda: rig.answers == ["nak"])
        rig.store.set_available(True)
        await rig.answered("nak", "ack")
        assert rig.told == [("a1", "written")]


# Jobs that are used up


async def test_a_job_that_nobody_may_claim_is_told_when_its_last_delivery_is_over():
    async with working(waits=replace(SHORT, retry_delay_s=0.02)) as rig:
        rig.verdicts = [ClaimRefused(reason="no such prefill worker", elsewhere=True)] * 3
        await rig.push(prefill_job())
        await rig.answered("nak", "nak", "term")
        assert rig.queue.delays == [0.02, 0.04]
        assert rig.told == [("a1", "abandoned")]
        assert rig.done[0].detail == (
            "given up after 3 deliveries: the claim was refused: no such prefill worker"
        )
        assert rig.done[0].number >= max(claim.number for claim in rig.claims)
        assert (rig.counted("retry"), rig.counted("used_up")) == (2, 1)
        assert await rig.total() == 0


async def test_a_job_whose_holders_all_died_is_told_and_not_worked_on():
    async with working(pulls=False, redeliver_s=0.01) as rig:
        await rig.push(prefill_job())
        for _ in range(3):
            assert await MemoryQueue.pull(rig.queue, timeout_s=5) is not None
        rig.pull()
        await rig.answered("term")
        assert (rig.claims, rig.engine.attempts) == ([], [])
        assert rig.told == [("a1", "abandoned")]
        assert rig.counted("used_up") == 1
        assert await rig.total() == 0


async def test_a_used_up_job_stays_until_its_engine_can_be_told():
    async with working() as rig:
        rig.messaging.set_connected(False)
        await rig.push(prefill_job())
        await eventually(lambda: rig.answers.count("nak") >= 4)
        assert "term" not in rig.answers
        rig.messaging.set_connected(True)
        await eventually(lambda: rig.answers[-1] == "term")
        assert rig.told == [("a1", "abandoned")]
        assert await rig.total() == 0


async def test_the_time_with_two_jobs_counts_once_and_that_without_a_job_not():
    async with working(runners=2) as rig:
        rig.engine.holds = True
        now = 100.0
        rig.jobs._now = lambda: now

        def measured() -> tuple[float | None, float | None]:
            names = ("written_tokens", "busy_seconds")
            one, two = (f"dynamo_lite_prefill_{name}_total" for name in names)
            return rig.registry.get_sample_value(one), rig.registry.get_sample_value(two)

        async def begin(attempt: str) -> None:
            await rig.push(prefill_job(attempt=attempt))
            await eventually(lambda: attempt in rig.engine.ends)

        await begin("a1")
        now += 2.0
        await begin("a2")
        now += 1.0
        assert measured() == (0.0, 0.0)
        rig.engine.ends["a1"].set_result("written")
        await rig.answered("ack")
        assert measured() == (6.0, 3.0)
        now += 4.0
        rig.engine.ends["a2"].set_result("failed")
        await rig.answered("ack", "ack")
        assert measured() == (6.0, 7.0)
        now += 50.0
        await begin("a3")
        now += 1.0
        rig.engine.ends["a3"].set_result("written")
        await rig.answered("ack", "ack", "ack")
        assert measured() == (12.0, 8.0)


async def test_a_job_whose_end_cannot_be_told_comes_again():
    """Else its engine would wait for this worker until its deadline."""
    async with computing() as rig:
        rig.messaging.set_connected(False)
        rig.engine.ends["a1"].set_result("failed")
        await eventually(lambda: rig.answers[:1] == ["nak"])
        rig.engine.holds = False
        rig.messaging.set_connected(True)
        await eventually(lambda: rig.answers[-1] == "ack")
        assert rig.told == [("a1", "written")]


async def test_a_job_that_comes_again_while_it_is_worked_on_is_not_told():
    async with working(runners=2, ack_wait_s=0.3, redeliver_s=0.05) as rig:
        rig.engine.holds = True
        await rig.push(prefill_job())
        # However often it is delivered, it does not count as over before its claim is granted.
        await eventually(lambda: rig.answers.count("nak") > 4)
        assert (rig.told, rig.engine.attempts) == ([], ["a1"])
        rig.engine.ends["a1"].set_result("written")
        await eventually(lambda: rig.answers[-1] == "ack")
        assert rig.told == [("a1", "written")]
        assert set(rig.answers) == {"nak", "ack"}


async def test_a_job_of_another_version_is_told_to_its_engine():
    async with working() as rig:
        await rig.push(prefill_job(wire_version=WIRE_VERSION + 1))
        await rig.answered("term")
        assert rig.told == [("a1", "failed")]
        assert f"unsupported wire version {WIRE_VERSION + 1}:" in rig.done[0].detail
        assert rig.claims == []


# What is no job


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xff\xff", b"\x80", encode(prefill_job(wire_version=WIRE_VERSION + 1))],
)
async def test_what_is_no_job_of_this_version_is_never_delivered_again(payload):
    async with working() as rig:
        await rig.push(payload)
        await rig.push(prefill_job())
        await rig.answered("term", "ack")
        assert await rig.total() == 0
        assert (rig.counted("malformed"), rig.counted("written")) == (1, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_ids": [5]},
        {"block_ids": [5, 6, 7]},
        {"num_computed_tokens": 5},
        {"block_ids": [5, POOL]},
        {"prefix_block_ids": [3, 4]},
        {"prefix_block_ids": [POOL]},
    ],
)
async def test_blocks_that_do_not_fit_never_reach_the_engine(wrong):
    async with working() as rig:
        await rig.push(prefill_job(**wrong))
        await rig.answered("ack")
        assert rig.told == [("a1", "failed")]
        assert rig.engine.attempts == []
        assert rig.counted("failed") == 1


@pytest.mark.parametrize(
    "refusal", [Refused("too long", elsewhere=False), IncompatiblePeer(ENGINE, "dtype=half here")]
)
async def test_an_engine_that_refuses_hands_the_job_back_as_failed(refusal):
    async with working() as rig:
        rig.engine.raises = refusal
        await rig.push(prefill_job())
        await rig.answered("ack")
        assert rig.told == [("a1", "failed")]
        assert rig.done[0].detail == str(refusal)


async def test_a_job_of_an_engine_that_left_is_acknowledged():
    async with working() as rig:
        await rig.push(prefill_job(engine_id="e2"))
        await rig.answered("ack")
        assert (rig.claims, rig.done) == ([], [])
        assert rig.counted("engine_gone") == 1


async def test_an_engine_whose_record_the_store_has_lost_is_told():
    async with working() as rig:
        await rig.store.delete(names.nixl_metadata_key(NAMESPACE, ENGINE))
        await rig.push(prefill_job())
        await rig.answered("ack")
        assert rig.claims == []
        assert rig.told == [("a1", "abandoned")]
        assert rig.counted("engine_gone") == 1


async def test_metadata_that_cannot_be_read_ends_the_job_unclaimed():
    async with working() as rig:
        await rig.store.put(names.nixl_metadata_key(NAMESPACE, ENGINE), b"{}")
        await rig.push(prefill_job())
        await rig.answered("term")
        assert (rig.claims, rig.told) == ([], [("a1", "failed")])
        assert rig.counted("malformed") == 1


# Computing beside the claim


class HeldClaim:
    """The decode engine has a claim, and does not answer yet."""

    def __init__(self) -> None:
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def __call__(self) -> None:
        self.asked.set()
        await self.may_answer.wait()


async def test_a_job_is_computed_and_not_written_while_its_claim_is_under_way():
    async with working() as rig:
        rig.on_claim = held = HeldClaim()
        await rig.push(prefill_job())
        await held.asked.wait()
        await eventually(lambda: rig.engine.attempts == ["a1"])
        assert rig.engine.verdict("a1") is PermitVerdict.PENDING
        held.may_answer.set()
        await rig.answered("ack")
        assert rig.engine.written == ["a1"]
        assert rig.told == [("a1", "written")]
        assert rig.engine.verdict("a1") is PermitVerdict.REFUSED, "nothing is written after the end"


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_claim_that_is_refused_stops_the_computing_before_the_job_is_answered(elsewhere):
    async with working() as rig:
        rig.engine.holds = True
        rig.on_claim = held = HeldClaim()
        rig.verdicts = [ClaimRefused(reason="claimed by 1", elsewhere=elsewhere)]
        await rig.push(prefill_job())
        await eventually(lambda: rig.engine.ends)
        ends = rig.engine.ends["a1"]
        abandon = rig.engine.abandon

        async def note(attempt: str) -> None:
            assert rig.answers == [] and rig.engine.verdict(attempt) is PermitVerdict.REFUSED
            rig.engine.holds = False
            await abandon(attempt)

        rig.engine.abandon = note
        held.may_answer.set()
        await eventually(lambda: rig.answers)
        assert ends.result() == "abandoned"
        assert rig.answers[0] == ("nak" if elsewhere else "ack")
        assert (rig.told, rig.counted("retry" if elsewhere else "refused")) == ([], 1)
        if elsewhere:
            await rig.answered("nak", "ack")
            assert rig.engine.attempts == ["a1", "a1"] and rig.told == [("a1", "written")]


async def test_a_job_whose_engine_is_gone_before_the_grant_stops_computing(monkeypatch):
    gone = asyncio.Event()

    async def nobody_there(self: MemoryMessaging, *args: Any, **kwargs: Any) -> bytes:
        await gone.wait()
        raise NoResponders("no process serves the claim")

    async with working(serving=False) as rig:
        rig.engine.holds = True
        with monkeypatch.context() as patched:
            patched.setattr(MemoryMessaging, "request", nobody_there)
            await rig.push(prefill_job())
            await eventually(lambda: rig.engine.ends)
            ends = rig.engine.ends["a1"]
            rig.engine.holds = False
            gone.set()
            await eventually(lambda: rig.answers[:1] == ["nak"])
        assert ends.result() == "abandoned"
        assert (rig.engine.written, rig.told, rig.counted("retry")) == ([], [], 1)
        async with rig.messaging.serve(names.claim_subject(NAMESPACE, ENGINE), rig.claim):
            await eventually(lambda: rig.answers[-1] == "ack")
        assert rig.engine.written == ["a1"]


async def test_a_grant_that_is_lost_or_late_writes_nothing():
    async with working(waits=replace(SHORT, claim_s=0.05)) as rig:
        rig.engine.holds = True
        rig.on_claim = held = HeldClaim()
        await rig.push(prefill_job())
        await rig.answered("ack")
        assert rig.told == [("a1", "abandoned")]
        assert rig.done[0].number == rig.claims[-1].number
        held.may_answer.set()
        rig.engine.holds = False
        rig.on_claim = None
        await rig.push(prefill_job("a2"))
        await rig.answered("ack", "ack")
        assert rig.engine.verdict("a1") is PermitVerdict.REFUSED
        assert rig.engine.written == ["a2"]


async def test_a_cancel_stops_the_writes_of_a_job_that_is_computed():
    async with working() as rig:
        rig.engine.holds = True
        await rig.push(prefill_job())
        await eventually(
            lambda: rig.engine.ends and rig.engine.verdict("a1") is PermitVerdict.GRANTED
        )
        await cancel(rig, "a1")
        await eventually(lambda: rig.engine.abandoned)
        assert rig.engine.verdict("a1") is PermitVerdict.REFUSED
        await rig.answered("ack")
        assert rig.told == [("a1", "abandoned")]


async def test_a_worker_that_ends_before_the_grant_refuses_its_permits():
    async with working() as rig:
        rig.engine.holds = True
        rig.on_claim = held = HeldClaim()
        await rig.push(prefill_job())
        await eventually(lambda: rig.engine.ends)
        rig.tasks[0].cancel()
        await asyncio.gather(rig.tasks.pop(), return_exceptions=True)
        assert rig.engine.verdict("a1") is PermitVerdict.REFUSED
        assert rig.engine.ends["a1"].cancelled()
        held.may_answer.set()


# Cancels


async def test_the_cancel_of_an_attempt_that_is_not_held_is_answered():
    async with working() as rig:
        await cancel(rig, "a9")
        await eventually(lambda: rig.done)
        assert rig.told == [("a9", "abandoned")]
        assert rig.engine.abandoned == []


async def test_a_worker_whose_engine_died_never_says_that_nothing_can_land_any_more():
    async with computing() as rig:
        rig.engine.ends["a1"].set_result("died")
        await rig.answered("ack")
        await cancel(rig, "a1")
        await eventually(lambda: len(rig.done) == 2)
        assert rig.told == [("a1", "died"), ("a1", "died")]


async def test_a_cancel_that_overtakes_the_granted_claim_is_heeded():
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        asked.set()
        await may_answer.wait()

    async with working() as rig:
        rig.on_claim = slow
        await rig.push(prefill_job())
        await asked.wait()
        await cancel(rig, "a1")
        await eventually(lambda: rig.engine.abandoned)
        may_answer.set()
        await rig.answered("ack")
        assert rig.engine.written == []
        assert rig.told == [("a1", "abandoned")]
        rig.on_claim = None
        await rig.push(prefill_job())
        await rig.answered("ack", "ack")
        assert rig.told[1:] == [("a1", "written")]


# Holding jobs


@virtual
async def test_a_long_job_stays_with_its_worker():
    async with working(ack_wait_s=0.6, redeliver_s=0.6) as rig:
        rig.engine.holds = True
        await rig.push(prefill_job())
        await eventually(lambda: rig.queue.answers.count("extend") >= 5)
        assert await MemoryQueue.pull(rig.queue, timeout_s=0) is None
        rig.engine.ends["a1"].set_result("written")
        await rig.answered("ack")
        assert rig.queue.answers[-1] == "ack"


async def test_stopping_lets_running_jobs_end_and_pulls_nothing_more():
    async with computing() as rig:
        await rig.push(prefill_job("a2"))
        await rig.jobs.stop()
        assert not rig.jobs.idle.is_set()
        rig.engine.ends["a1"].set_result("written")
        await rig.jobs.idle.wait()
        await rig.answered("ack")
        assert rig.engine.attempts == ["a1"]
        assert await rig.total() == 1


async def test_an_end_that_cannot_be_told_or_answered_leaves_the_job_to_redelivery():
    async with computing() as rig:
        rig.messaging.set_connected(False)
        rig.broker.set_connected(False)
        rig.engine.ends["a1"].set_result("written")
        await rig.answered("ack")
        rig.messaging.set_connected(True)
        rig.broker.set_connected(True)
        assert rig.done == []
        assert await rig.total() == 1


async def test_a_written_job_that_comes_again_is_told_again_and_not_written_again():
    """A second grant could be given before the engine has noticed the first write, and be used when
    it computes with the blocks already."""
    async with working() as rig:
        for _ in range(2):
            await rig.push(prefill_job())
        await rig.answered("ack", "ack")
        assert rig.told == [("a1", "written"), ("a1", "written")]
        assert len(rig.claims) == 1 and rig.engine.attempts == ["a1"]
        assert (rig.counted("written"), rig.counted("refused")) == (1, 1)


# Links


async def test_a_job_for_an_engine_without_a_way_to_it_is_left_unclaimed_to_others():
    # The second delivery stands for another worker, whose link to the engine is used.
    async with working(links=ScriptedLinks("rank 0: connection reset", times=1)) as rig:
        await rig.push(prefill_job())
        await rig.answered("nak", "ack")
        assert len(rig.claims) == 1 and rig.told == [("a1", "written")]
        assert (rig.counted("left"), rig.counted("written")) == (1, 1)


async def test_a_job_that_the_queue_would_drop_is_given_back_to_its_engine():
    async with working(links=ScriptedLinks("rank 0: connection reset")) as rig:
        await rig.push(prefill_job())
        await rig.answered("nak", "nak", "ack")
        assert rig.claims == [] and rig.engine.attempts == []
        assert rig.told == [("a1", "failed")]
        assert "cannot be written into: rank 0: connection reset" in rig.done[0].detail
        assert (rig.counted("left"), rig.counted("unusable")) == (2, 1)


@pytest.mark.parametrize("outcome", ["written", "failed", "abandoned"])
async def test_only_a_written_job_shows_that_the_link_works(outcome: str):
    links = ScriptedLinks()
    async with computing(links=links) as rig:
        rig.engine.ends["a1"].set_result(outcome)
        await rig.answered("ack")
    assert links.successes == ([ENGINE] if outcome == "written" else [])


async def test_a_worker_that_closes_without_a_drain_stops_its_jobs_before_its_queue():
    """As after a start that was interrupted. A stopped queue answers a pull at once: a loop that
    went on pulling would not let the event loop run."""
    async with working() as rig:
        worker = PrefillWorker({}, process_spec("PrefillWorker"))
        worker._jobs = rig.jobs
        worker._stack.push_async_callback(rig.queue.stop_pulling)
        worker._stack.callback(lambda: closing.append(rig.jobs._pulling))
        closing: list[bool] = []
        await worker.close()
        assert closing == [False]
        _, left = await asyncio.wait(rig.tasks, timeout=5)
        assert not left
