"""A prefill worker's jobs, over the in-process twins and a scripted engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import WIRE_VERSION, encode
from dynamo_lite.protocol.errors import Refused
from dynamo_lite.protocol.prefill import (
    Claim,
)
from tests.builders import ENGINE, NAMESPACE, eventually, prefill_job
from tests.unit.prefill_rig import LEASE, POOL, Rig, ScriptedLinks, working
from tests.unit.virtual import virtual

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


@asynccontextmanager
async def computing(**options: Any) -> AsyncIterator[Rig]:
    """The engine computes job a1 until the test ends it."""
    async with working(**options) as rig:
        await rig.begin(prefill_job())
        yield rig


# How jobs end


async def test_a_written_job_is_claimed_reported_and_acknowledged():
    async with working() as rig:
        await rig.push(prefill_job())
        await rig.acked()
        [claim] = rig.claims
        assert claim == Claim(attempt="a1", claim=1, writer_lease_id=LEASE)
        assert rig.told == [("a1", "written")]
        assert rig.done[0].claim == claim.claim
        assert rig.engine.cells["a1"].claim == claim.claim
        assert await rig.total() == 0
        assert rig.counted("written") == 1


async def test_a_job_that_cannot_be_looked_up_because_the_store_is_away_is_handed_back():
    async with working() as rig:
        rig.store.set_available(False)
        await rig.push(prefill_job())
        await rig.acked()
        assert (rig.claims, rig.told) == ([], [("a1", "abandoned")])
        assert rig.done[0].claim == 0


async def test_the_time_with_two_jobs_counts_once_and_that_without_a_job_not():
    async with working(runners=2) as rig:
        rig.engine.holds = True
        now = 100.0
        rig.jobs._now = lambda: now

        def measured() -> tuple[float | None, float | None]:
            names = ("written_tokens", "busy_seconds")
            one, two = (f"dynamo_lite_prefill_{name}_total" for name in names)
            return rig.registry.get_sample_value(one), rig.registry.get_sample_value(two)

        await rig.begin(prefill_job("a1"))
        now += 2.0
        await rig.begin(prefill_job("a2"))
        now += 1.0
        assert measured() == (0.0, 0.0)
        rig.engine.ends["a1"].set_result("written")
        await rig.acked()
        assert measured() == (6.0, 3.0)
        now += 4.0
        rig.engine.ends["a2"].set_result("failed")
        await rig.acked(2)
        assert measured() == (6.0, 7.0)
        now += 50.0
        await rig.begin(prefill_job("a3"))
        now += 1.0
        rig.engine.ends["a3"].set_result("written")
        await rig.acked(3)
        assert measured() == (12.0, 8.0)


@virtual
async def test_an_end_that_cannot_be_reported_is_reported_when_the_broker_is_back():
    async with computing() as rig:
        rig.messaging.set_connected(False)
        rig.engine.ends["a1"].set_result("failed")
        await asyncio.sleep(1)
        assert rig.queue.acked == []
        rig.messaging.set_connected(True)
        await rig.acked()
        assert rig.told == [("a1", "failed")]


# What is no job


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xff\xff", b"\x80", encode(prefill_job(wire_version=WIRE_VERSION + 1))],
)
async def test_what_is_no_job_of_this_version_leaves_the_queue(payload):
    async with working() as rig:
        await rig.push(payload)
        await rig.push(prefill_job())
        await rig.acked(2)
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
async def test_blocks_that_do_not_fit_are_never_claimed(wrong):
    async with working() as rig:
        await rig.push(prefill_job(**wrong))
        await rig.acked()
        assert (rig.told, rig.done[0].claim) == ([("a1", "failed")], 0)
        assert (rig.claims, rig.engine.attempts) == ([], [])
        assert rig.counted("malformed") == 1


async def test_an_engine_that_refuses_hands_the_job_back_as_failed():
    async with working() as rig:
        rig.engine.raises = Refused("too long", elsewhere=False)
        await rig.push(prefill_job())
        await rig.acked()
        assert rig.told == [("a1", "failed")]
        assert rig.done[0].detail == str(rig.engine.raises)
        assert rig.done[0].claim == rig.claims[0].claim
        assert rig.engine.until("a1") == 0.0


async def test_a_job_of_an_engine_that_left_is_acknowledged():
    async with working() as rig:
        await rig.push(prefill_job(engine_id="e2"))
        await rig.acked()
        assert (rig.claims, rig.done) == ([], [])
        assert rig.counted("engine_gone") == 1


async def test_an_engine_whose_record_the_store_has_lost_gets_a_report():
    async with working() as rig:
        await rig.store.delete(names.nixl_metadata_key(NAMESPACE, ENGINE))
        await rig.push(prefill_job())
        await rig.acked()
        assert rig.claims == []
        assert rig.told == [("a1", "abandoned")]
        assert rig.counted("engine_gone") == 1


# Leaving


async def test_jobs_that_were_delivered_and_not_begun_are_handed_back_unclaimed():
    """The queue delivers each job once: no other worker gets them."""
    async with computing() as rig:
        for attempt in ("a2", "a3"):
            await rig.push(prefill_job(attempt))
            job = await super(type(rig.queue), rig.queue).pull(timeout_s=1)
            assert job is not None
            rig.queue.kept.append(job)
        await rig.jobs.stop()
        rig.engine.ends["a1"].set_result("written")
        await rig.acked(3)
        assert [(done.attempt, done.claim, done.outcome) for done in rig.done] == [
            ("a1", 1, "written"),
            ("a2", 0, "abandoned"),
            ("a3", 0, "abandoned"),
        ]
        assert rig.done[1].detail == "this worker leaves"
        assert rig.engine.attempts == ["a1"] and {each.attempt for each in rig.claims} == {"a1"}
        assert await rig.total() == 0


async def test_a_job_that_is_delivered_while_the_queue_stops_is_handed_back():
    """The queue answers pulls at once by then: the worker does not ask it again and again."""
    async with working(runners=0) as rig:
        await rig.push(prefill_job())
        job = await super(type(rig.queue), rig.queue).pull(timeout_s=1)
        assert job is not None
        pulls, stopping, delivered = 0, asyncio.Event(), asyncio.Event()
        pull, stop = rig.queue.pull, rig.queue.stop_pulling

        async def counted(**wanted: Any) -> Any:
            nonlocal pulls
            pulls += 1
            return await pull(**wanted)

        async def slow() -> None:
            await stop()
            stopping.set()
            await delivered.wait()
            rig.queue.kept.append(job)

        rig.queue.pull, rig.queue.stop_pulling = counted, slow
        rig.pull()
        await eventually(lambda: pulls)
        leaving = asyncio.create_task(rig.jobs.stop())
        await stopping.wait()
        for _ in range(50):
            await asyncio.sleep(0)
        assert pulls == 1 and rig.queue.acked == []
        delivered.set()
        await leaving
        await rig.acked()
        assert (rig.told, rig.claims) == ([("a1", "abandoned")], [])
        await rig.tasks[0]


# Links


async def test_a_job_for_an_engine_without_a_way_to_it_is_handed_back_unclaimed():
    async with working(links=ScriptedLinks("rank 0: connection reset")) as rig:
        await rig.push(prefill_job())
        await rig.acked()
        assert rig.claims == [] and rig.engine.attempts == []
        assert (rig.told, rig.done[0].claim) == ([("a1", "failed")], 0)
        assert "cannot be written into: rank 0: connection reset" in rig.done[0].detail
        assert rig.counted("unusable") == 1


@pytest.mark.parametrize("outcome", ["written", "failed", "abandoned"])
async def test_only_a_written_job_shows_that_the_link_works(outcome: str):
    links = ScriptedLinks()
    async with computing(links=links) as rig:
        rig.engine.ends["a1"].set_result(outcome)
        await rig.acked()
    assert links.link.failures == (0 if outcome == "written" else 1)


async def test_a_worker_that_closes_without_a_drain_stops_its_jobs_before_its_queue():
    """As after a start that was interrupted. A stopped queue answers a pull at once: a loop that
    went on pulling would not let the event loop run."""
    async with working() as rig:
        closing: list[bool] = []
        async with AsyncExitStack() as stack:  # of the host
            stack.push_async_callback(rig.queue.stop_pulling)
            stack.callback(lambda: closing.append(rig.jobs._leaving.is_set()))
            stack.push_async_callback(rig.jobs.stop)
        assert closing == [True]
        _, left = await asyncio.wait(rig.tasks, timeout=5)
        assert not left
