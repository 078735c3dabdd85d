"""Workers that join and leave a graph under load: no request fails."""

import asyncio
import contextlib
import random
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.vllm.asking import prompt_ids, tokens_of
from tests.vllm.graph import (
    PAIR_LEASE,
    Graph,
    PlainServer,
    eventually,
    health_of,
    reached,
    sample_sum,
)
from tests.vllm.live import live_options
from tests.vllm.test_decisions import REMOTE, counting

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400), pytest.mark.takes_workers]

JOBS = "dynamo_lite_prefill_jobs_total"
MOVED = "dynamo_lite_requests_moved_total"


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


def left_in_order(graph: Graph, component: str, instance: int, restarts: int = 0) -> bool:
    """Exit 0, and not started again. restarts: those before."""
    process = graph.process(component, instance)
    line = f"{component}-{instance}" in graph.output and "left the graph (exit 0)" in graph.output
    return line and process.state == "stopped" and process.restarts == restarts


async def test_a_revoked_decode_worker_finishes_what_it_has(pair: Graph, reference: PlainServer):
    leaving, requests = pair.process("VllmWorker", 1), load(seed=500, count=40, tokens=220)
    moved = pair.count("Frontend", MOVED)
    async with under_load(pair, reference, requests):
        await reached(
            lambda: health_of(leaving)["in_flight"] >= 4, timeout_s=30, what="it has requests"
        )
        await revoke(pair, leaving.lease)
    assert pair.count("Frontend", MOVED) == moved
    assert re.search(
        r"draining: [1-9]\d* requests in flight are finished", pair.log_of("VllmWorker", 1)
    )
    assert eventually(
        lambda: left_in_order(pair, "VllmWorker", 1, leaving.restarts),
        timeout_s=10,
        what="exit 0, no restart",
    )
    assert [r.lease_id for r in await pair.records() if r.endpoint == "generate"] == [
        int(pair.process("VllmWorker", 0).lease, 16)
    ]
    await pair.settled()


async def test_a_prefill_worker_joins_by_being_started_and_another_leaves(
    pair: Graph, reference: PlainServer, tmp_path: Path
):
    """The new one takes jobs at once. The old one, revoked amid its work, finishes its
    writes: no remote prefill is lost or late. What it had not begun it gives back, for the new one.
    """
    options = [*pair.servers, PAIR_LEASE]
    leaving = pair.process("PrefillWorker")
    with (
        Graph(tmp_path, options=options, service="PrefillWorker") as joined,
        # What the prefill workers do is counted exactly.
        live_options(pair, {"VllmWorker.max-queue-wait-s": 600}),
    ):
        await pair.settled()
        free = sum(pool.free_blocks for pool in await pair.pools())
        async with under_load(pair, reference, load(seed=510, count=32, tokens=4)):
            pass
        await reached(
            lambda: joined.count("PrefillWorker", JOBS, outcome="written") >= 2,
            timeout_s=30,
            what="the new one has taken jobs",
        )
        assert sample_sum(leaving.status_url, JOBS, outcome="written") >= 2

        in_order, since = _in_order(pair), counting(pair)
        ended = pair.count("VllmWorker", REMOTE)
        async with under_load(pair, reference, load(seed=511, count=48, tokens=4)):
            written = sample_sum(leaving.status_url, JOBS, outcome="written")
            await reached(
                lambda: sample_sum(leaving.status_url, JOBS, outcome="written") > written,
                timeout_s=30,
                what="it works",
            )
            await revoke(pair, leaving.lease)
        assert eventually(
            lambda: left_in_order(pair, "PrefillWorker", 0), timeout_s=10, what="exit 0"
        )
        remote = since()["remote/long"]
        assert remote > 2
        assert pair.count("VllmWorker", REMOTE) == ended + remote
        assert _in_order(pair) == in_order + remote
        await pair.settled(free)


def _in_order(graph: Graph) -> float:
    """Remote prefills that were written or given back before they began."""
    outcomes = "committed", "writer_abandoned"
    return sum(graph.count("VllmWorker", REMOTE, outcome=each) for each in outcomes)
