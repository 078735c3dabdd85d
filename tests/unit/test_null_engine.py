"""The null engine keeps the promises of DecodeEngine."""

import asyncio

import msgspec
import pytest
from msgspec.structs import replace

from dynamo_lite.engine.base import DecodeEngine
from dynamo_lite.protocol.errors import Refused
from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta
from tests.builders import generate_request
from tests.null_engine import NullEngine


def request_of(request_id: str, **sampling: object) -> GenerateRequest:
    return generate_request(request_id, sampling=msgspec.msgpack.encode(sampling))


async def collect(engine: DecodeEngine, requests: int) -> list[list[TokenDelta]]:
    """The steps until that many requests have finished."""
    steps: list[list[TokenDelta]] = []
    async with asyncio.timeout(5):
        async for step in engine.steps():
            steps.append(step)
            requests -= sum(delta.finish_reason is not None for delta in step)
            if requests == 0:
                break
    return steps


async def test_each_request_gets_its_tokens_in_lockstep():
    async with NullEngine(token_id=9, tokens_per_step=2) as engine:
        await engine.submit(request_of("a", max_tokens=3, temperature=0.0))
        await engine.submit(request_of("b", max_tokens=4))
        assert engine.load.running == 2
        steps = await collect(engine, 2)
    assert [[delta.request_id for delta in step] for step in steps] == [["a", "b"]] * 2
    a = [step[0] for step in steps]
    assert [delta.token_ids for delta in a] == [[9, 9], [9]]
    assert [delta.finish_reason for delta in a] == [None, "length"]
    assert a[0].prefill is not None and a[0].prefill.prompt_tokens == 3
    assert a[1].prefill is None
    assert engine.load.running == 0


async def test_an_aborted_request_gets_nothing_more():
    async with NullEngine(max_tokens=2) as engine:
        for request_id in ("a", "b"):
            await engine.submit(request_of(request_id))
        await engine.abort(["a", "unknown"])
        steps = await collect(engine, 1)
    assert {delta.request_id for step in steps for delta in step} == {"b"}


async def test_a_request_goes_on_after_tokens_that_it_got_elsewhere():
    async with NullEngine(
        tokens_per_step=2,
        max_tokens=4,
        token_at=lambda prompt, position: 10 * len(prompt) + position,
    ) as engine:
        for request_id, done in (("new", []), ("moved", [30]), ("complete", [30, 31, 32, 33])):
            await engine.submit(replace(request_of(request_id), output_token_ids=done))
        steps = await collect(engine, 3)
    got: dict[str, list[int]] = {}
    for delta in (delta for step in steps for delta in step):
        got.setdefault(delta.request_id, []).extend(delta.token_ids)
    assert got == {"new": [30, 31, 32, 33], "moved": [31, 32, 33], "complete": []}
    assert [delta.finish_reason for delta in steps[0]] == [None, None, "length"]


async def test_steps_wait_for_requests_and_end_with_the_engine():
    async with NullEngine(max_tokens=1) as engine:
        steps = engine.steps()
        waiting = asyncio.ensure_future(anext(steps))
        await engine.submit(request_of("a"))
        assert [delta.request_id for delta in await waiting] == ["a"]
        ending = asyncio.ensure_future(anext(steps))
    with pytest.raises(StopAsyncIteration):
        await ending


@pytest.mark.parametrize("sampling", [{"max_tokens": 0}, {"max_tokens": "many"}])
async def test_bad_sampling_is_refused(sampling: dict[str, object]):
    async with NullEngine() as engine:
        with pytest.raises(Refused) as caught:
            await engine.submit(request_of("a", **sampling))
    assert not caught.value.elsewhere
