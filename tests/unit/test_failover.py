"""Requests that outlive their workers, in virtual time."""

import asyncio

import pytest

from dynamo_lite.protocol.generate import TokenDelta
from dynamo_lite.request_plane.migrating_request import MigratingRequest, MigrationPlan
from tests.builders import endpoint_record
from tests.unit.fake_workers import (
    ANSWER_TOKENS,
    answer_to,
    cluster,
    request_of,
    rows_of,
    steps,
    to_the_end,
)
from tests.unit.virtual import virtual

CONTINUE = MigrationPlan()
REPLAY = MigrationPlan(replay=True)
STAY = MigrationPlan(stay="test")

A = request_of("a")


@pytest.mark.parametrize("plan", [CONTINUE, REPLAY])
@virtual
async def test_a_killed_worker_s_request_goes_on_exactly(plan: MigrationPlan):
    async with cluster() as (fake, client):
        fake.workers[2].tokens_per_step = 2  # the border lies within a delta
        await client.submit(A, movable=plan)
        await steps(3)
        fake.kill(1)
        await to_the_end(client)
        assert fake.tokens("a") == answer_to(A)
        assert fake.ends == [("a", "length")]
        (again,) = fake.workers[2].asked
        assert again.moved and again.request_id != "a"
        assert again.output_token_ids == (answer_to(A)[:3] if plan is CONTINUE else [])
        assert client.stats.moved == {"continue" if plan is CONTINUE else "replay": 1}
        assert fake.running() == {}
        # What is said once of a request arrives once.
        deltas = fake.deltas["a"]
        assert [d.prefill is not None for d in deltas] == [True] + [False] * (len(deltas) - 1)
        assert [d for d in deltas if d.prompt_logprobs is not None] == deltas[:1]
        for delta in deltas:
            assert delta.logprobs == rows_of(delta.token_ids)


@virtual
async def test_a_request_that_cannot_move_ends_with_the_reason():
    async with cluster() as (fake, client):
        await client.submit(A, movable=STAY)
        await steps(1)
        fake.kill(1)
        assert fake.ends == [("a", "WorkerLost")]
        assert "connection lost" in str(fake.errors["a"]) and "test" in str(fake.errors["a"])
        assert client.in_flight == 0 and client.stats.lost == 1


@pytest.mark.parametrize("answer_tokens", [2, ANSWER_TOKENS])
@virtual
async def test_a_repetition_that_differs_or_ends_early_is_not_passed_on(answer_tokens: int):
    async with cluster() as (fake, client):
        fake.workers[2].own_tokens = answer_tokens == ANSWER_TOKENS
        fake.workers[2].answer_tokens = answer_tokens
        await client.submit(A, movable=REPLAY)
        await steps(3)
        fake.kill(1)
        await to_the_end(client)
        assert fake.tokens("a") == answer_to(A)[:3]
        assert fake.ends == [("a", "WorkerLost")]
        assert "replayed" in str(fake.errors["a"])
        assert fake.running() == {}


@virtual
async def test_lost_again_and_again_up_to_a_limit():
    async with cluster() as (fake, client):
        await client.submit(A, movable=REPLAY)
        for lease_id in (1, 2, 1, 2):
            await steps(2)
            fake.start(3 - lease_id)
            fake.kill(lease_id)
        assert fake.ends == [("a", "WorkerLost")]
        assert "3 times" in str(fake.errors["a"])
        assert fake.tokens("a") == answer_to(A)[:2]


@virtual
async def test_a_lost_request_does_not_wait_for_ever():
    async with cluster(1, move_wait_s=15.0) as (fake, client):
        await client.submit(A, movable=CONTINUE)
        await steps(3)
        fake.kill(1)
        await asyncio.sleep(14.9)
        assert fake.ends == []
        await asyncio.sleep(0.2)
        assert fake.ends == [("a", "WorkerLost")]
        assert client.in_flight == 0


@virtual
async def test_an_id_that_a_caller_uses_again_is_another_one_on_the_wire():
    async with cluster(1) as (fake, client):
        await client.submit(A, movable=CONTINUE)
        await steps(2)
        await client.abort(["a"])
        await client.submit(A, movable=CONTINUE)
        client.take_deltas([TokenDelta(request_id="a~1", token_ids=[1], finish_reason="length")])
        await to_the_end(client)
        assert [r.request_id for r in fake.workers[1].asked] == ["a~1", "a~2"]
        assert fake.ends == [("a", "length")]
        assert fake.tokens("a")[-len(answer_to(A)) :] == answer_to(A)


@virtual
async def test_an_abort_while_the_request_is_on_its_way_reaches_the_worker():
    """Before that the worker does not know the request."""
    async with cluster(1) as (fake, client):
        fake.workers[1].accepts_after_s = 0.5
        submitting = asyncio.create_task(client.submit(A, movable=CONTINUE))
        await asyncio.sleep(0.1)
        await client.abort(["a"])
        await submitting
        assert not fake.workers[1].running and fake.owner, "it had begun"


def test_the_log_probabilities_of_a_prompt_are_passed_on_once():
    rows, flight = rows_of(range(8)), MigratingRequest(A, REPLAY, None)

    def take(*tokens: int) -> TokenDelta | None:
        return flight.take(TokenDelta(request_id="a", token_ids=list(tokens), prompt_logprobs=rows))

    flight.attempt("a", endpoint_record(), 0.0)
    first = take(1)
    assert first is not None and first.prompt_logprobs == rows
    flight.moves += 1
    flight.attempt("a", endpoint_record(), 0.0)
    again = take(1, 2)
    assert again is not None and (again.token_ids, again.prompt_logprobs) == ([2], None)
