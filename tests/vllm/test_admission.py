"""Limits and deadlines on a running graph: refused clients get the reason, and nothing is left
over."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.vllm.asking import prompt_ids
from tests.vllm.graph import Graph, eventually
from tests.vllm.live import live_options

pytestmark = pytest.mark.timeout(300)
limits = pytest.mark.usefixtures("limited")

REFUSED = "dynamo_lite_requests_refused_total"
EXPIRED = "dynamo_lite_requests_expired_total"
TEXT = {"model": "tiny", "prompt": "hi", "max_tokens": 4}
#: Longer than any test.
ENDLESS = TEXT | {"max_tokens": 8000, "ignore_eos": True, "stream": True}
TIMEOUT = {"x-request-timeout": "4"}


@pytest.fixture
def graph(disagg: Graph) -> Graph:
    return disagg


@pytest.fixture
def limited(graph: Graph) -> Iterator[None]:
    """The workers take little, and so does the Frontend."""
    with live_options(
        graph,
        {
            "Frontend.max-in-flight-requests": 8,
            "VllmWorker.max-in-flight-requests": 4,
            "VllmWorker.max-queued-tokens": 5000,
        },
    ):
        yield


@pytest.fixture
async def http(graph: Graph) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"{graph.url}/v1", timeout=60) as http:
        yield http


@asynccontextmanager
async def _busy_with(http: httpx.AsyncClient, count: int) -> AsyncIterator[None]:
    """Runs this many streams, which have begun."""
    lines: list[AsyncIterator[str]] = []  # whoever drops one hangs up
    async with AsyncExitStack() as stack:
        for _ in range(count):
            answer = await stack.enter_async_context(
                http.stream("POST", "/completions", json=ENDLESS)
            )
            assert answer.status_code == 200, await answer.aread()
            lines.append(answer.aiter_lines())
            await anext(lines[-1])
        yield


async def _at_rest(graph: Graph, free_blocks: int) -> None:
    def idle() -> bool:
        health = graph.health("VllmWorker")
        return health["in_flight"] == health["running"] == health["waiting"] == 0

    eventually(idle, timeout_s=20, what="the engine runs nothing")
    await graph.settled(free_blocks)
    assert graph.count("Frontend", "dynamo_lite_requests_in_flight") == 0


@limits
async def test_beyond_the_limits_is_a_429(graph: Graph, http: httpx.AsyncClient):
    (before,) = await graph.pools()
    refusals = {why: graph.count("Frontend", REFUSED, reason=why) for why in ("busy", "limit")}
    async with _busy_with(http, 4):
        for stream in (False, True):
            refused = await http.post("/completions", json=TEXT | {"stream": stream})
            assert refused.status_code == 429, refused.text
            assert int(refused.headers["retry-after"]) >= 1
            assert "4 of at most 4 requests are in flight" in refused.json()["error"]["message"]
        many = await http.post("/completions", json=TEXT | {"n": 5, "stream": True})
        assert many.status_code == 429 and int(many.headers["retry-after"]) >= 1
        assert "4 of at most 8 requests are in flight" in many.json()["error"]["message"]
    await _at_rest(graph, before.free_blocks)
    assert (await http.post("/completions", json=TEXT)).status_code == 200
    assert graph.count("Frontend", REFUSED, reason="busy") == refusals["busy"] + 2
    assert graph.count("Frontend", REFUSED, reason="limit") == refusals["limit"] + 1


@limits
async def test_a_flood_is_answered_to_all_who_come_again(graph: Graph, http: httpx.AsyncClient):
    """More prompt tokens than the worker queues, from more clients than it takes."""
    seen: list[int] = []

    async def one(number: int) -> None:
        body = TEXT | {"prompt": prompt_ids(2000, 900 + number), "ignore_eos": True}
        while True:
            answer = await http.post("/completions", json=body)
            seen.append(answer.status_code)
            if answer.status_code == 200:
                assert answer.json()["usage"]["completion_tokens"] == 4
                return
            assert answer.status_code == 429, answer.text
            await asyncio.sleep(int(answer.headers["retry-after"]))

    await asyncio.gather(*(one(number) for number in range(12)))
    assert seen.count(200) == 12 and 429 in seen


async def test_a_request_that_is_not_done_in_time_stops_everywhere(
    graph: Graph, http: httpx.AsyncClient
):
    (before,) = await graph.pools()
    expired = graph.count("Frontend", EXPIRED)
    whole = {**ENDLESS, "stream": False, "n": 2, "temperature": 1}
    late, stream = await asyncio.gather(
        http.post("/completions", json=whole, headers=TIMEOUT),
        http.post("/completions", json=ENDLESS, headers=TIMEOUT),
    )
    assert late.status_code == 504 and "4 s" in late.json()["error"]["message"]
    lines = [line.removeprefix("data: ") for line in stream.text.splitlines() if line]
    assert stream.status_code == 200 and lines[-1] == "[DONE]"
    *answer, last = [json.loads(line) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in answer)
    assert last["error"]["code"] == 504
    await _at_rest(graph, before.free_blocks)
    assert graph.count("Frontend", EXPIRED) >= expired + 2
    # Under this name vLLM logs streams that end with an error.
    graph.excuse("Error in completion stream generator")


async def test_time_runs_while_a_prompt_is_elsewhere(graph: Graph, http: httpx.AsyncClient):
    """Expired at every stage of a remote prefill; the blocks come back."""
    (before,) = await graph.pools()

    async def one(number: int) -> int:
        body: dict[str, Any] = TEXT | {"prompt": prompt_ids(4000, 940 + number), "max_tokens": 2}
        headers = {"x-request-timeout": f"{0.02 * (number + 1):.2f}"}
        return (await http.post("/completions", json=body, headers=headers)).status_code

    statuses = [await one(number) for number in range(12)]
    assert set(statuses) <= {200, 504} and 504 in statuses
    await _at_rest(graph, before.free_blocks)
