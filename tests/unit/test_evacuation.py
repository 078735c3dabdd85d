"""Requests that move off a decode worker that drains, in virtual time.

A worker gives a token per second, also the first one. So three prompt tokens per second are
measured, and a request moves while its end is farther away than its prompt and output.
"""

import asyncio
import random
from typing import Any

import msgspec
import pytest

from dynamo_lite.policy.routing.migration import Continue, MigrationPlan, Replay, Stay
from dynamo_lite.protocol.errors import Refused
from dynamo_lite.protocol.generate import GenerateRequest
from dynamo_lite.protocol.records import EndpointRecord
from tests.unit.fake_workers import (
    ANSWER_TOKENS,
    FakeWorkers,
    answer_to,
    cluster,
    request_of,
    rows_of,
    steps,
    to_the_end,
)
from tests.unit.virtual import virtual

CONTINUE = Continue(reason="test")
REPLAY = Replay(reason="test")
STAY = Stay(reason="test")


def limited(request_id: str, **changes: Any) -> GenerateRequest:
    sampling = msgspec.msgpack.encode({"max_tokens": ANSWER_TOKENS})
    return request_of(request_id, sampling=sampling, **changes)


A = limited("a")


def exact(fake: FakeWorkers, request: GenerateRequest) -> None:
    """The client has got the whole answer once, and every fact about it once."""
    deltas = fake.deltas[request.request_id]
    assert fake.tokens(request.request_id) == answer_to(request)
    assert [d.prefill is not None for d in deltas] == [True] + [False] * (len(deltas) - 1)
    assert [d for d in deltas if d.prompt_logprobs is not None] == deltas[:1]
    for delta in deltas:
        assert delta.logprobs == (rows_of(delta.token_ids) if delta.token_ids else None)


def client_pace(client: Any, token_s: float) -> None:
    """As if an answer with this many seconds per token had ended before."""
    client._costs._measured.ended(ANSWER_TOKENS, ANSWER_TOKENS, ANSWER_TOKENS * token_s)


@virtual
async def test_a_request_goes_on_elsewhere_when_its_worker_drains():
    async with cluster() as (fake, client):
        await client.submit(A, movable=CONTINUE)
        await steps(3)
        client_pace(client, token_s=1.0)
        fake.leave(1)
        await steps(0)
        assert fake.running() == {2: ["a~2"]}
        await to_the_end(client)
        exact(fake, A)
        (again,) = fake.workers[2].asked
        assert again.moved and again.output_token_ids == answer_to(A)[:3]
        assert fake.ends == [("a", "length")]
        assert (client.stats.moved, client.stats.drained) == ({"continue": 1}, 1)


@pytest.mark.parametrize(("after", "moves"), [(1, True), (4, False)])
@virtual
async def test_a_replay_moves_only_early_in_its_answer(after: int, moves: bool):
    """It also generates again what the client has."""
    async with cluster() as (fake, client):
        await client.submit(A, movable=REPLAY)
        await steps(after)
        client_pace(client, token_s=1.0)
        fake.leave(1)
        await to_the_end(client)
        exact(fake, A)
        assert client.stats.moved == ({"replay": 1} if moves else {})


@pytest.mark.parametrize(("plan", "after"), [(STAY, 3), (CONTINUE, 7)])
@virtual
async def test_what_cannot_move_or_ends_soon_stays(plan: MigrationPlan, after: int):
    async with cluster() as (fake, client):
        await client.submit(A, movable=plan)
        await steps(after)
        client_pace(client, token_s=1.0)
        fake.leave(1)
        await to_the_end(client)
        exact(fake, A)
        assert len(fake.workers[1].asked) == 1 and fake.workers[2].asked == []
        assert client.stats.drained == 0


@virtual
async def test_it_stays_and_loses_nothing_when_nobody_else_accepts_it():
    """While the others are asked, its worker's deltas wait."""
    async with cluster() as (fake, client):
        await client.submit(A, movable=CONTINUE)
        await steps(3)
        client_pace(client, token_s=1.0)
        fake.workers[2].accepts_after_s = 2.0
        fake.workers[2].refusal = Refused("full", elsewhere=True)
        fake.leave(1)
        await asyncio.sleep(1.2)
        assert len(fake.tokens("a")) == 3
        await to_the_end(client)
        exact(fake, A)
        assert len(fake.workers[2].asked) == 1
        assert (client.stats.moved, client.stats.drained, client.stats.lost) == ({}, 0, 0)


@virtual
async def test_the_only_worker_keeps_its_requests():
    async with cluster(workers=1) as (fake, client):
        await client.submit(A, movable=CONTINUE)
        await steps(3)
        client_pace(client, token_s=1.0)
        fake.leave(1)
        await to_the_end(client)
        exact(fake, A)


@pytest.mark.parametrize("accepts", [True, False])
@virtual
async def test_the_draining_worker_dies_while_another_one_is_asked(accepts: bool):
    async with cluster(workers=3) as (fake, client):
        await client.submit(A, movable=CONTINUE)
        await steps(3)
        client_pace(client, token_s=1.0)
        fake.workers[2].accepts_after_s = fake.workers[3].accepts_after_s = 0.7
        if not accepts:
            for lease_id in (2, 3):
                fake.workers[lease_id].refusal = Refused("full", elsewhere=True)
        fake.leave(1)
        await asyncio.sleep(0.2)
        fake.kill(1)
        await asyncio.sleep(3)
        for lease_id in (2, 3):
            fake.workers[lease_id].refusal = None
        await to_the_end(client)
        exact(fake, A)
        assert client.stats.drained == (1 if accepts else 0)
        assert sum(client.stats.moved.values()) == 1


@virtual
async def test_the_new_worker_dies_at_once_and_a_third_one_goes_on():
    async with cluster(workers=3) as (fake, client):
        await client.submit(A, movable=CONTINUE)
        await steps(3)
        client_pace(client, token_s=1.0)
        fake.leave(1)
        await asyncio.sleep(0)
        (lease_id,) = [i for i in fake.running() if i != 1] or [2]
        fake.kill(lease_id)
        await to_the_end(client)
        exact(fake, A)
        assert fake.running() == {}


@pytest.mark.parametrize("how", ["abort", "timeout"])
@virtual
async def test_a_request_that_ends_while_it_moves_runs_nowhere(how: str):
    async with cluster() as (fake, client):
        request = limited("a", timeout_s=4.5) if how == "timeout" else A
        await client.submit(request, movable=CONTINUE)
        await steps(3)
        client_pace(client, token_s=1.0)
        fake.workers[2].frozen = True
        fake.leave(1)
        await asyncio.sleep(0.2)
        assert fake.running() == {1: ["a~1"]}
        if how == "abort":
            await client.abort(["a"])
        await asyncio.sleep(1.5)
        assert fake.running() == {}
        fake.thaw(2)
        await to_the_end(client)
        assert fake.running() == {}
        assert len(fake.tokens("a")) == 3
        assert [end for _, end in fake.ends] == ([] if how == "abort" else ["DeadlineExceeded"])


@virtual
async def test_the_old_attempt_ends_also_when_the_new_one_ends_at_once():
    async with cluster() as (fake, client):
        await client.submit(A, movable=CONTINUE)
        await steps(3)
        client_pace(client, token_s=1.0)
        accept = fake.submit

        async def accept_and_end(member: EndpointRecord, request: GenerateRequest) -> None:
            await accept(member, request)
            worker = fake.workers[member.lease_id]
            worker.tokens_per_step = ANSWER_TOKENS
            client.take_deltas([worker.step(request.request_id)])
            del worker.running[request.request_id]

        fake.submit = accept_and_end
        fake.leave(1)
        await steps(0)
        exact(fake, A)
        assert fake.ends == [("a", "length")]
        assert fake.running() == {}
        await to_the_end(client)


@virtual
async def test_a_few_move_at_a_time_and_moves_off_drains_use_up_no_losses():
    async with cluster(max_moves=0) as (fake, client):
        requests = [limited(name) for name in "abcdefghijkl"]
        fake.workers[2].listed = False
        for request in requests:
            await client.submit(request, movable=CONTINUE)
        await steps(3)
        client_pace(client, token_s=1.0)
        fake.workers[2].listed = True
        fake.workers[2].frozen = True
        fake.leave(1)
        await asyncio.sleep(0.1)
        assert len(fake.workers[2].asked) == 4
        fake.thaw(2)
        await asyncio.sleep(0.1)
        assert sorted(fake.running()) == [2] and len(fake.running()[2]) == len(requests)
        await to_the_end(client)
        for request in requests:
            exact(fake, request)
        assert client.stats.drained == len(requests) and client.stats.lost == 0


@virtual
async def test_what_runs_where_and_what_it_costs():
    async with cluster() as (_, client):
        await client.submit(A, movable=CONTINUE)
        await client.submit(limited("b"), movable=STAY)
        await steps(6)
        loads = client.load_facts()
        assert {lease: load["requests"] for lease, load in loads.items()} == {"1": 1, "2": 1}
        # Two tokens are left. To move it would cost nine tokens at three per second.
        assert loads["1"]["busy_s"] == pytest.approx(2 * 5.5 / 5)
        await client.abort(["a", "b"])
        assert client.load_facts() == {}


@pytest.mark.parametrize("seed", range(40))
def test_drains_deaths_and_refusals_in_any_order_lose_nothing(seed: int):
    @virtual
    async def run() -> None:
        rng = random.Random(seed)
        async with cluster(workers=4, max_moves=50) as (fake, client):
            client_pace(client, token_s=1.0)
            requests = [limited(f"r{i}") for i in range(20)]
            for number, request in enumerate(requests):
                await client.submit(request, movable=rng.choice([CONTINUE, REPLAY]))
                await asyncio.sleep(rng.choice([0.0, 0.3, 1.0]))
                lease_id = rng.randint(1, 4)
                worker = fake.workers[lease_id]
                listed = sum(one.listed and not one.dead for one in fake.workers.values())
                if worker.listed and listed > 1 and rng.random() < 0.5:
                    fake.leave(lease_id)
                elif not worker.listed and not worker.running and rng.random() < 0.7:
                    fake.start(lease_id)
                elif not worker.listed and rng.random() < 0.3:
                    fake.kill(lease_id)
                elif rng.random() < 0.2:
                    worker.accepts_after_s = rng.choice([0.0, 0.5, 2.0])
                assert number < len(requests)
            await to_the_end(client)
            for request in requests:
                assert fake.tokens(request.request_id) == answer_to(request)
            assert sorted(fake.ends) == sorted((r.request_id, "length") for r in requests)
            assert fake.running() == {}
            drained.append(client.stats.drained)

    drained: list[int] = []
    run()
    assert drained[0] > 0
