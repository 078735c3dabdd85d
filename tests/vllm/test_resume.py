"""A prefill worker that dies half-way through a long prompt: another one does the rest."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from tests.vllm.asking import prompt_ids, tokens_of
from tests.vllm.graph import Graph, PlainServer, eventually, sample_sum
from tests.vllm.test_decisions import REMOTE
from tests.vllm.test_prefix_read import COMPUTED, READS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

TOKENS = 6000
RESUMES = "dynamo_lite_remote_prefill_resumes_total"
#: Chunks of one block: long enough under way to be killed half-way.
OPTIONS = (
    "--PrefillWorker.ServiceArgs.workers=2",
    "--PrefillWorker.max-num-batched-tokens=32",
    "--PrefillWorker.max-num-seqs=4",
    "--Graph.lease-ttl-s=5",
)


@pytest.fixture(scope="module")
def graph(stage) -> Iterator[Graph]:
    with stage.alone(options=OPTIONS) as graph:
        yield graph


def computed(graph: Graph) -> list[float]:
    return [sample_sum(p.status_url, COMPUTED) for p in graph.processes("PrefillWorker")]


async def test_the_second_attempt_computes_what_the_first_had_not_finished(
    graph: Graph, reference: PlainServer
):
    requests = [{"prompt": prompt_ids(TOKENS, seed=600), "max_tokens": 8}]
    expected = await tokens_of(reference.url, requests)
    await graph.settled()
    free = (await graph.pools())[0].free_blocks
    committed = graph.count("VllmWorker", REMOTE, outcome="committed")
    before = computed(graph)
    answer = asyncio.create_task(tokens_of(graph.url, requests))

    def half_done() -> int | None:
        for instance, tokens in enumerate(computed(graph)):
            if tokens - before[instance] > 0.5 * TOKENS:
                return instance + 1
        return None

    # The loop of this test must not be held up: the request goes through it.
    found = await asyncio.to_thread(
        eventually, half_done, timeout_s=60, what="a worker is half through"
    )
    victim, survivor = found - 1, 2 - found
    pid = graph.process("PrefillWorker", victim).pid
    os.kill(pid, signal.SIGKILL)
    url = graph.process("PrefillWorker", survivor).status_url
    assert await answer == expected
    assert graph.count("VllmWorker", RESUMES, reason="writer_lost") == 1
    assert graph.count("VllmWorker", REMOTE, outcome="committed") == committed + 1
    assert sample_sum(url, READS, outcome="read") == 1
    share = (sample_sum(url, COMPUTED) - before[survivor]) / TOKENS
    assert 0 < share < 0.6, share
    await graph.settled(free, timeout_s=60)
    assert not graph.errors(), graph.errors()
