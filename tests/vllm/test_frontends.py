"""Two Frontends on one port, over the workers of the shared graph."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.vllm.asking import Stream, prompt_ids
from tests.vllm.graph import PAIR_OPTIONS, Graph, eventually, reached, together

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

#: That all of them go to one of two processes has a chance of 2 ** -23.
CONNECTIONS = 24
LONG = 1200


@pytest.fixture(scope="module")
def pair(stage: Any) -> Graph:
    return stage.shared(PAIR_OPTIONS)


@pytest.fixture(scope="module")
def shared(pair: Graph, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graph]:
    options = [*pair.servers, "--Frontend.ServiceArgs.workers=2", "--Frontend.router=kv"]
    directory = tmp_path_factory.mktemp("shared")
    frontends = Graph(directory, options=options, service="Frontend")
    with together([frontends]):
        yield frontends


def stream(number: int, max_tokens: int) -> Stream:
    body = {
        "prompt": prompt_ids(40, 1800 + number),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    return Stream("completions", body)


async def tokens(url: str, asked: Stream) -> list[int]:
    """Over a connection of its own."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        return (await asked.run(http))["tokens"][0]


def running(frontends: Graph, instance: int) -> int:
    return frontends.health("Frontend", instance)["requests"]


def vllm_finished(text: str) -> float:
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "vllm:request_success_total"
        and sample.labels["finished_reason"] == "length"
    )


async def test_both_serve_one_port_and_their_answers_are_the_same(pair: Graph, shared: Graph):
    urls = {process.instance: process.status_url for process in shared.processes("Frontend")}
    assert sorted(urls) == [0, 1]

    async def answers(graph: Graph) -> list[list[int]]:
        asked = (stream(number, 12) for number in range(CONNECTIONS))
        return await asyncio.gather(*(tokens(graph.url, one) for one in asked))

    assert await answers(shared) == await answers(pair)
    finished = {
        instance: vllm_finished(httpx.get(f"{url}/metrics/vllm", timeout=10).text)
        for instance, url in urls.items()
    }
    assert sum(finished.values()) == CONNECTIONS and min(finished.values()) > 0


async def test_one_that_is_killed_costs_its_own_streams_only(shared: Graph):
    """Every other stream continues, new connections are accepted at once, and the Frontend is
    restarted."""
    streams = [stream(number, LONG) for number in range(CONNECTIONS)]
    answers = [asyncio.create_task(tokens(shared.url, one)) for one in streams]
    await reached(
        lambda: all(one.tokens() for one in streams), timeout_s=60, what="all streams have begun"
    )
    held = running(shared, 0)
    assert 0 < held < CONNECTIONS and held + running(shared, 1) == CONNECTIONS
    before = shared.process("Frontend", 0)
    os.kill(before.pid, signal.SIGKILL)
    # What the dead one had not accepted yet is reset; a connection that is made now is not.
    await reached(
        lambda: shared.process("Frontend", 0).pid != before.pid, timeout_s=10, what="it has ended"
    )
    new = await asyncio.gather(*(tokens(shared.url, stream(90 + n, 4)) for n in range(8)))
    assert all(len(each) == 4 for each in new)
    outcomes = await asyncio.gather(*answers, return_exceptions=True)
    lost = [isinstance(outcome, httpx.TransportError) for outcome in outcomes]
    assert sum(lost) == held, outcomes
    expected = (stream(number, LONG) for number in range(CONNECTIONS))
    whole = await asyncio.gather(*(tokens(shared.url, one) for one in expected))
    for right, outcome, gone in zip(whole, outcomes, lost, strict=True):
        assert gone or outcome == right
    eventually(
        lambda: shared.process("Frontend", 0).state == "ready",
        timeout_s=90,
        what="the killed one is ready again",
    )
    assert shared.url == shared.run.http
