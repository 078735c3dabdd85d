"""Workers that live but do not answer: others do their work, and they come back."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.vllm.asking import prompt_ids, tokens_of
from tests.vllm.graph import Graph, PlainServer, reached

pytestmark = pytest.mark.timeout(400)

MOVED = "dynamo_lite_requests_moved_total"
UNRESPONSIVE = "dynamo_lite_workers_unresponsive"


@pytest.fixture
def graph(pair: Graph) -> Iterator[Graph]:
    """No process of it is restarted because of these tests."""
    before = [process.restarts for process in pair.processes()]
    yield pair
    assert [process.restarts for process in pair.processes()] == before


def shorts(count: int, seed: int, tokens: int = 8) -> list[dict]:
    return [{"prompt": prompt_ids(20 + i, seed), "max_tokens": tokens} for i in range(count)]


@contextlib.asynccontextmanager
async def stopped(pid: int, *, group: bool = False) -> AsyncIterator[None]:
    """Stops a process, or its whole group, with SIGSTOP."""
    send = os.killpg if group else os.kill
    send(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        send(pid, signal.SIGCONT)


def responsive(graph: Graph) -> int:
    return graph.health("Frontend")["responsive"]


def in_flight(graph: Graph, instance: int) -> int:
    return graph.health("VllmWorker", instance)["in_flight"]


async def both_have_requests(graph: Graph) -> None:
    await reached(
        lambda: in_flight(graph, 0) and in_flight(graph, 1), timeout_s=20, what="both have requests"
    )


async def both_work(graph: Graph) -> None:
    await reached(lambda: responsive(graph) == 2, timeout_s=10, what="both decode workers respond")
    assert graph.count("Frontend", UNRESPONSIVE) == 0
    assert all(graph.health("VllmWorker", i)["ok"] for i in range(2))
    await reached(
        lambda: in_flight(graph, 0) == 0, timeout_s=10, what="it has forgotten what has moved"
    )
    await graph.settled()


@pytest.mark.parametrize("victim", ["worker", "engine"])
async def test_a_decode_worker_that_stands_still_is_passed_over_and_comes_back(
    graph: Graph, reference: PlainServer, victim: str
):
    """A stopped worker is detected by missing heartbeats; a stopped engine is reported by its
    worker. Running requests wait for it; later ones go to the other worker."""
    begun, later = shorts(8, seed=800, tokens=300), shorts(8, seed=801, tokens=40)
    expected = await tokens_of(reference.url, [*begun, *later])
    pid = graph.process("VllmWorker", 0).pid
    if victim == "engine":
        pid = graph.engine_pid("VllmWorker", 0)
    moved = graph.count("Frontend", MOVED)
    asking = asyncio.create_task(tokens_of(graph.url, begun))
    await both_have_requests(graph)
    async with stopped(pid, group=victim == "worker"):
        await reached(
            lambda: responsive(graph) == 1, timeout_s=8, what="the worker is out of rotation"
        )
        assert graph.count("Frontend", UNRESPONSIVE) == 1
        if victim == "engine":
            facts = graph.health("VllmWorker", 0)
            assert not facts["ok"] and facts["trouble"].startswith("the engine has not")
        assert await tokens_of(graph.url, later) == expected[8:]
        assert graph.count("Frontend", MOVED) == moved, "nothing has been moved for this"
    assert await asking == expected[:8]
    await both_work(graph)


async def test_a_worker_that_stands_still_for_long_loses_its_requests(
    graph: Graph, reference: PlainServer
):
    requests = shorts(8, seed=810, tokens=300)
    expected = await tokens_of(reference.url, requests)
    worker = graph.process("VllmWorker", 0)
    moved = graph.count("Frontend", MOVED, how="continue")
    asking = asyncio.create_task(tokens_of(graph.url, requests))
    await both_have_requests(graph)
    began = time.monotonic()
    async with stopped(worker.pid, group=True):
        assert await asking == expected
        assert 8 < time.monotonic() - began < 40
    assert graph.count("Frontend", MOVED, how="continue") > moved
    await both_work(graph)
