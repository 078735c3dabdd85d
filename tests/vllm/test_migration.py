"""Decode workers that are lost during their answers: every stream continues, token for token."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from dynamo_lite.serve.run_state import ProcessState
from tests.vllm.asking import Stream, assert_same, prompt_ids, prose
from tests.vllm.graph import Graph, PlainServer, eventually, health_of

pytestmark = pytest.mark.timeout(400)

#: The path, and the body without what makes it a stream.
Request = tuple[str, dict[str, Any]]

MOVED = "dynamo_lite_requests_moved_total"
LOST = "dynamo_lite_requests_lost_total"
#: How many events every stream must have had when a worker is lost.
BEGUN = 2

GREEDY = {"temperature": 0, "max_tokens": 450, "ignore_eos": True}
# Short prompts: vLLM's CPU engine dies of a seeded prompt that it computes in chunks.
SEEDED = {"temperature": 0.8, "seed": 5, "max_tokens": 400, "ignore_eos": True}
REGEX = {"temperature": 0, "max_tokens": 500, "structured_outputs": {"regex": "[a-f ]{400}"}}


def _chat(number: int, /, **params: Any) -> Request:
    return "chat/completions", {
        "messages": [{"role": "user", "content": prose(9, number)}],
        **params,
    }


def _text(tokens: int, number: int, /, **params: Any) -> Request:
    return "completions", {"prompt": prompt_ids(tokens, number), **params}


#: Neighbours differ: workers take turns.
STREAMS = [
    _text(30, 700, **GREEDY),
    _text(31, 701, **GREEDY),
    _chat(702, **SEEDED),
    _text(32, 703, **SEEDED),
    _text(800, 704, **GREEDY),
    _text(801, 705, **GREEDY),
    _chat(706, **REGEX),
    _chat(707, **REGEX),
    _chat(708, logprobs=True, top_logprobs=3, **GREEDY),
    _text(33, 709, logprobs=2, presence_penalty=0.3, **GREEDY),
    _text(34, 710, n=2, **SEEDED),
]


async def answers_of(url: str, streams: list[Stream]) -> list[dict[str, Any]]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        return list(await asyncio.gather(*(stream.run(http) for stream in streams)))


def streams_of(requests: list[Request]) -> list[Stream]:
    return [Stream(kind, body) for kind, body in requests]


@pytest.fixture(scope="module")
def expected(reference: PlainServer) -> list[dict[str, Any]]:
    return asyncio.run(answers_of(reference.url, streams_of(STREAMS)))


def _moved(graph: Graph) -> dict[str, float]:
    return {how: graph.count("Frontend", MOVED, how=how) for how in ("fresh", "continue", "replay")}


def is_back(graph: Graph, instance: int, pid: int) -> bool:
    process = graph.process("VllmWorker", instance)
    return process.state == "ready" and process.pid != pid


@asynccontextmanager
async def under_way(
    graph: Graph, requests: list[Request], victim: ProcessState
) -> AsyncIterator[asyncio.Future]:
    """The answers to come; on entry all streams have begun, none has ended, and the
    victim has its share of them.

    A cold worker may begin so late that others are done, or be passed over: then they
    are asked again.
    """
    for _ in range(3):
        streams = streams_of(requests)
        asking = asyncio.create_task(answers_of(graph.url, streams))
        try:
            async with asyncio.timeout(120):
                while not (asking.done() or all(len(s.chunks) >= BEGUN for s in streams)):
                    await asyncio.sleep(0.005)
            share = (await asyncio.to_thread(health_of, victim))["in_flight"]
            if share >= len(requests) // 3 and not any(stream.ended for stream in streams):
                yield asking
                return
            await asking
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
    raise AssertionError("never are all streams under way, on both workers")


@pytest.mark.parametrize("victim", ["engine", "component"])
async def test_a_killed_decode_worker_costs_no_answer(
    pair: Graph, expected: list[dict[str, Any]], victim: str
):
    process = pair.process("VllmWorker", 0)
    pid = pair.engine_pid("VllmWorker", 0) if victim == "engine" else process.pid
    before, lost = _moved(pair), pair.count("Frontend", LOST)
    async with under_way(pair, STREAMS, process) as answers:
        os.kill(pid, signal.SIGKILL)
        got = await answers
    for request, answer, right in zip(STREAMS, got, expected, strict=True):
        assert answer["tokens"] == right["tokens"], request
        assert_same(answer, right, str(request))
    after = _moved(pair)
    assert after["continue"] > before["continue"] and after["replay"] > before["replay"]
    assert pair.count("Frontend", LOST) == lost
    eventually(lambda: is_back(pair, 0, process.pid), timeout_s=180, what="the worker is back")
    await pair.settled()
