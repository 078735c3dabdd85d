"""Workers that join and leave a graph under load: nobody's request fails."""

import asyncio
import contextlib
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest

from dynamo_lite.serve.run_state import ProcessState
from tests.vllm.asking import prompt_ids, tokens_of
from tests.vllm.graph import Graph, PlainServer, eventually, sample_sum
from tests.vllm.test_decisions import REMOTE, counting

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

JOBS = "dynamo_lite_prefill_jobs_total"


@pytest.fixture(scope="module")
def graph(stage) -> Iterator[Graph]:
    """Two decode workers and one prefill worker."""
    with stage.alone(options=["--VllmWorker.ServiceArgs.workers=2"]) as graph:
        yield graph


def load(seed: int, count: int, tokens: int) -> list[dict]:
    """Half long, half short prompts, each with an answer of exactly `tokens` tokens."""
    rng = random.Random(seed)
    lengths = [rng.randrange(20, 400) if i % 2 else rng.randrange(600, 2500) for i in range(count)]
    return [
        {"prompt": prompt_ids(n, seed), "max_tokens": tokens, "ignore_eos": True} for n in lengths
    ]


@contextlib.asynccontextmanager
async def under_load(
    graph: Graph, reference: PlainServer, requests: list[dict]
) -> AsyncIterator[None]:
    """Load beside the body; every answer must be right."""
    expected = await tokens_of(reference.url, requests)
    asking = asyncio.create_task(tokens_of(graph.url, requests))
    try:
        yield
        assert await asking == expected
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def revoke(graph: Graph, lease: str) -> None:
    """scripts/revoke_lease.py LEASE --wait"""
    command = [sys.executable, "scripts/revoke_lease.py", lease, "--wait"]
    done = await asyncio.to_thread(
        subprocess.run,
        [*command, "--state-dir", str(graph.directory)],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def left_in_order(graph: Graph, component: str, instance: int) -> bool:
    """Exit 0, and not started again."""
    process = graph.process(component, instance)
    line = f"{component}-{instance}" in graph.output and "left the graph (exit 0)" in graph.output
    return line and process.state == "stopped" and process.restarts == 0


def _draining_with_work(health) -> bool:
    return health["state"] == "draining" and health["in_flight"] > 0


async def test_a_revoked_decode_worker_finishes_what_it_has(graph: Graph, reference: PlainServer):
    leaving = graph.process("VllmWorker", 0)
    async with under_load(graph, reference, load(seed=500, count=48, tokens=400)):
        await _until(lambda: _health(leaving)["in_flight"] >= 2)
        revoking = asyncio.create_task(revoke(graph, leaving.lease))
        await _until(lambda: _draining_with_work(_health(leaving)))
        await revoking
    assert eventually(
        lambda: left_in_order(graph, "VllmWorker", 0), timeout_s=10, what="exit 0, no restart"
    )
    assert [r.lease_id for r in await graph.records() if r.endpoint == "generate"] == [
        int(graph.process("VllmWorker", 1).lease, 16)
    ]
    await graph.settled()


async def test_a_prefill_worker_joins_by_being_started_and_another_leaves(
    graph: Graph, reference: PlainServer, tmp_path: Path
):
    """The new one takes jobs at once. The old one, revoked amid its work, finishes its
    writes: no remote prefill is lost or late, and what it had not begun the new one does."""
    options = ["--nats-url", graph.nats_url, "--etcd-url", graph.etcd_url]
    leaving = graph.process("PrefillWorker")
    with Graph(tmp_path, options=options, service="PrefillWorker") as joined:
        await graph.settled()
        free = sum(pool.free_blocks for pool in await graph.pools())
        async with under_load(graph, reference, load(seed=510, count=32, tokens=4)):
            pass
        await _until(lambda: joined.count("PrefillWorker", JOBS, outcome="written") >= 2)
        assert sample_sum(leaving.status_url, JOBS, outcome="written") >= 2

        committed, since = graph.count("VllmWorker", REMOTE, outcome="committed"), counting(graph)
        ended = graph.count("VllmWorker", REMOTE)
        async with under_load(graph, reference, load(seed=511, count=48, tokens=4)):
            await _until(lambda: _health(leaving)["jobs"] > 0)
            await revoke(graph, leaving.lease)
        assert eventually(
            lambda: left_in_order(graph, "PrefillWorker", 0), timeout_s=10, what="exit 0"
        )
        remote = since()["remote/long"]
        assert remote > 2
        assert graph.count("VllmWorker", REMOTE) == ended + remote
        assert graph.count("VllmWorker", REMOTE, outcome="committed") == committed + remote
        await graph.settled(free)


async def _until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    async with asyncio.timeout(timeout_s):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.02)


def _health(process: ProcessState) -> dict:
    """Also of a process that is on its way out, and says 503."""
    return httpx.get(f"{process.status_url}/health", timeout=10).json()
