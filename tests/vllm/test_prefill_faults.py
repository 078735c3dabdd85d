"""Prefill workers that hang or die: every answer is right, and no block is lost."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from tests.vllm.asking import prompt_ids, tokens_of
from tests.vllm.graph import Graph, PlainServer, eventually, reached, sample_sum
from tests.vllm.live import command
from tests.vllm.slow import LEASE_S, SLOW_OPTIONS, longs, outcomes, until, works_remotely
from tests.vllm.test_decisions import counting
from tests.vllm.test_prefix_read import COMPUTED, READS

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]

JOBS = "dynamo_lite_prefill_jobs_total"
UNUSABLE = "dynamo_lite_prefill_workers_unusable"
UNRESPONSIVE = "dynamo_lite_prefill_workers_unresponsive"
RESUMES = "dynamo_lite_remote_prefill_resumes_total"


@pytest.fixture
def graph(slow: Graph) -> Graph:
    return slow


async def test_a_stopped_worker_leaves_the_graph_and_comes_back(
    graph: Graph, reference: PlainServer
):
    """The whole worker is stopped for longer than its lease lives. No request waits for it any
    more. When it continues, its lease is lost, and it is restarted."""
    first, rest = longs(3, seed=410), longs(3, seed=411)
    expected = await tokens_of(reference.url, [*first, *rest])
    await graph.settled()
    free = (await graph.pools())[0].free_blocks
    worker = graph.process("PrefillWorker")
    os.killpg(worker.pid, signal.SIGSTOP)
    try:
        assert await tokens_of(graph.url, first) == expected[:3]
        await _gone(graph, worker.lease)
        since = counting(graph)
        assert await tokens_of(graph.url, rest, 1) == expected[3:]
        assert since() == {"local/no_prefill_worker": 3}
    finally:
        os.killpg(worker.pid, signal.SIGCONT)
    await _restarted(graph, worker.restarts)
    await graph.settled(free)
    await works_remotely(graph, reference, seed=412)


async def test_what_a_killed_worker_had_written_is_not_computed_again(
    graph: Graph, reference: PlainServer, tmp_path: Path
):
    tokens = 6000
    requests = [{"prompt": prompt_ids(tokens, seed=600), "max_tokens": 8}]
    expected = await tokens_of(reference.url, requests)
    options = [*graph.servers, *SLOW_OPTIONS]
    with Graph(tmp_path, options=options, service="PrefillWorker") as joined:
        await graph.settled()
        free = (await graph.pools())[0].free_blocks
        both = graph, joined
        workers = [each.process("PrefillWorker") for each in both]
        before = [sample_sum(worker.status_url, COMPUTED) for worker in workers]
        committed = outcomes(graph, "committed")
        resumed = graph.count("VllmWorker", RESUMES, reason="writer_lost")

        def half_done() -> list[int]:
            done = [sample_sum(worker.status_url, COMPUTED) for worker in workers]
            return [i for i in (0, 1) if done[i] - before[i] > 0.5 * tokens]

        answer = asyncio.create_task(tokens_of(graph.url, requests))
        [victim] = await reached(half_done, timeout_s=60, what="a worker is half through")
        survivor = 1 - victim
        os.kill(workers[victim].pid, signal.SIGKILL)
        # The lease is refreshed ten times in its time, so that nine tenths of it were left.
        await reached(
            lambda: graph.count("VllmWorker", RESUMES, reason="writer_lost") > resumed,
            timeout_s=0.8 * LEASE_S,
            what="the prompt goes on before the killed worker's lease would have ended",
        )
        assert await answer == expected
        assert graph.count("VllmWorker", RESUMES, reason="writer_lost") == resumed + 1
        assert outcomes(graph, "committed") == committed + 1
        url = workers[survivor].status_url
        assert sample_sum(url, READS, outcome="read") == 1
        assert 0 < (sample_sum(url, COMPUTED) - before[survivor]) / tokens < 0.6
        await graph.settled(free, timeout_s=60)
        await _restarted(both[victim], workers[victim].restarts)


async def test_a_worker_that_does_not_fit_is_asked_for_nothing(
    graph: Graph, reference: PlainServer, tmp_path: Path
):
    """Its KV has another dtype, its lease another duration. It is alive, but while the worker that
    fits is stopped, all prompts are local at once; none is queued for it."""
    requests = longs(3, seed=420)
    expected = await tokens_of(reference.url, requests)
    options = [*graph.servers, *SLOW_OPTIONS]
    options += ["--PrefillWorker.dtype=bfloat16", f"--Graph.lease-ttl-s={LEASE_S + 1}"]
    with Graph(tmp_path, options=options, service="PrefillWorker") as joined:
        unfit = joined.process("PrefillWorker")
        eventually(
            lambda: graph.count("VllmWorker", UNUSABLE) == 1, timeout_s=10, what="it is known"
        )
        [link] = json.loads(command(graph, "top", "--json"))["failed_links"]
        why = link["detail"]
        assert link["prefill"] == unfit.lease
        assert "dtype: " in why and f"lease_ttl_s: '{LEASE_S + 1}' here, '{LEASE_S}' there" in why
        assert f"unfit for every decode worker, so it gets no jobs: {why}" in joined.output
        rows = json.loads(command(graph, "ps", "--json"))
        assert {row["state"] for row in rows if row["lease"] == unfit.lease} == {"unfit"}
        since = counting(graph)
        engine = graph.engine_pid("PrefillWorker")
        os.kill(engine, signal.SIGSTOP)
        try:
            eventually(
                lambda: graph.count("VllmWorker", UNRESPONSIVE) == 1,
                timeout_s=15,
                what="the worker that fits stands still",
            )
            await until(graph, lambda pool: pool.unusable_writers == pool.unresponsive_writers == 1)
            assert await tokens_of(graph.url, requests, 1) == expected
            assert since() == {"local/no_prefill_worker": 3}
            assert (await graph.pools())[0].queue_jobs == 0
        finally:
            os.kill(engine, signal.SIGCONT)
        last = command(graph, "explain", "--last", "1", "--json")
        seen = json.loads(last)[0]["queue"]
        assert (seen["prefill_workers"], seen["prefill_workers_alive"]) == (0, 1)
        await graph.settled()
        await works_remotely(graph, reference, seed=421)
        assert sample_sum(unfit.status_url, JOBS) == 0, "it has not even pulled one"


async def _gone(graph: Graph, lease: str) -> None:
    async with asyncio.timeout(20):
        while any(f"{record.lease_id:x}" == lease for record in await graph.records()):
            await asyncio.sleep(0.1)


async def _restarted(graph: Graph, restarts: int) -> None:
    def ready_again() -> bool:
        worker = graph.process("PrefillWorker")
        return worker.state == "ready" and worker.restarts == restarts + 1

    await reached(ready_again, timeout_s=150, what="the prefill worker is ready again")
