"""Who is asked, what is held, and how requests end before their answer does."""

import asyncio

import pytest

from dynamo_lite.protocol.errors import (
    DeadlineExceeded,
    NoWorkers,
    Refused,
    Unavailable,
)
from dynamo_lite.request_plane.failover import MAX_REQUEST_ID
from dynamo_lite.request_plane.migrating_request import MigrationPlan
from tests.builders import loop_time
from tests.unit.fake_workers import answer_to, cluster, request_of, steps
from tests.unit.virtual import virtual

CONTINUE = MigrationPlan()

A = request_of("a")


# Asking


@virtual
async def test_each_worker_is_asked_at_most_once():
    async with cluster(3) as (fake, client):
        fake.workers[1].dead = True
        fake.workers[2].refusal = DeadlineExceeded("request", 5.0)
        fake.workers[3].refusal = Refused("draining", elsewhere=True)
        with pytest.raises(Unavailable, match="draining"):
            await client.submit(A, movable=CONTINUE)
        assert [len(w.asked) for w in fake.workers.values()] == [1, 1, 1]
        assert client.in_flight == 0
        fake.workers[2].refusal = None
        await client.submit(A, movable=CONTINUE)


@virtual
async def test_what_no_worker_would_take_is_asked_once():
    async with cluster() as (fake, client):
        fake.workers[1].refusal = Refused("too long", elsewhere=False)
        with pytest.raises(Refused, match="too long"):
            await client.submit(A, movable=CONTINUE)
        assert fake.workers[2].asked == []
        client.set_members(())
        with pytest.raises(NoWorkers):
            await client.submit(A, movable=CONTINUE)
        with pytest.raises(Refused, match="240"):
            await client.submit(request_of("x" * (MAX_REQUEST_ID + 1)), movable=CONTINUE)


# Deadlines and aborts


@virtual
async def test_a_deadline_ends_the_request_here_and_at_its_worker():
    async with cluster() as (fake, client):
        began = loop_time()
        await client.submit(request_of("a", timeout_s=3.5), movable=CONTINUE)
        assert fake.workers[1].asked[0].timeout_s == pytest.approx(3.5)
        await steps(2)
        fake.kill(1)
        await asyncio.sleep(0)
        assert fake.workers[2].asked[0].timeout_s == pytest.approx(1.0)
        while not fake.ends:
            await asyncio.sleep(0.01)
        assert loop_time() - began == pytest.approx(3.5, abs=0.02)
        assert fake.ends == [("a", "DeadlineExceeded")]
        await steps(2)
        assert fake.running() == {} and client.stats.expired == 1
        assert fake.tokens("a") == answer_to(A)[:2]


@pytest.mark.parametrize("fault", ["slow", "over"])
@virtual
async def test_a_deadline_before_any_worker_took_it(fault: str):
    async with cluster() as (fake, client):
        fake.workers[1].accepts_after_s = 10.0
        began = loop_time()
        timeout_s = 0.0 if fault == "over" else 3.0
        with pytest.raises(DeadlineExceeded, match="request a"):
            await client.submit(request_of("a", timeout_s=timeout_s), movable=CONTINUE)
        assert loop_time() - began == pytest.approx(timeout_s)
        assert client.in_flight == 0 and fake.ends == [] and client.stats.expired == 1
        assert bool(fake.workers[1].asked) == (fault != "over")


@virtual
async def test_closing_ends_moves_and_requests_without_a_reply():
    async with cluster(1) as (fake, client):
        await client.submit(A, movable=CONTINUE)
        fake.kill(1)
        fake.start(2)
        fake.workers[2].accepts_after_s = 5.0
        asking = asyncio.create_task(client.submit(request_of("b"), movable=CONTINUE))
        await asyncio.sleep(1)
        assert len(fake.workers[2].asked) == 2
    with pytest.raises(Unavailable, match="closed"):
        await asking
    assert client.in_flight == 0 and fake.ends == []
    with pytest.raises(Unavailable, match="closed"):
        await client.submit(A, movable=CONTINUE)
