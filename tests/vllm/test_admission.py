"""Limits and deadlines on a running graph: refused clients get the reason, and nothing is left
over."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.vllm.asking import prompt_ids
from tests.vllm.graph import Graph, eventually

pytestmark = pytest.mark.timeout(300)
EXPIRED = "dynamo_lite_requests_expired_total"
TEXT = {"model": "tiny", "prompt": "hi", "max_tokens": 4}
#: Longer than any test.
ENDLESS = TEXT | {"max_tokens": 8000, "ignore_eos": True, "stream": True}
TIMEOUT = {"x-request-timeout": "4"}


@pytest.fixture
def graph(disagg: Graph) -> Graph:
    return disagg


@pytest.fixture
async def http(graph: Graph) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"{graph.url}/v1", timeout=60) as http:
        yield http


async def _at_rest(graph: Graph, free_blocks: int) -> None:
    def idle() -> bool:
        health = graph.health("VllmWorker")
        return health["in_flight"] == health["running"] == health["waiting"] == 0

    eventually(idle, timeout_s=20, what="the engine runs nothing")
    await graph.settled(free_blocks)
    assert graph.count("Frontend", "dynamo_lite_requests_in_flight") == 0


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
