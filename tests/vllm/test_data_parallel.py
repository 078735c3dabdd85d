"""Workers with several data-parallel ranks on both sides: each rank is an engine of its own."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.decisions import Explain, decode_explained
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.serve.processes import is_alive
from tests.vllm.asking import prompt_ids, tokens_of
from tests.vllm.graph import (
    NAMESPACE,
    Graph,
    PlainServer,
    command_line,
    descendants_of,
    eventually,
    reached,
)
from tests.vllm.live import command
from tests.vllm.slow import SLOW_OPTIONS, longs
from tests.vllm.test_decisions import counting
from tests.vllm.test_migration import is_back

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]

RANKS = 2


@pytest.fixture(scope="module")
def ranks(stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graph]:
    stage.clear()
    options = [
        f"--{service}.data-parallel-size={RANKS}" for service in ("VllmWorker", "PrefillWorker")
    ]
    graph = Graph(tmp_path_factory.mktemp("ranks"), options=[*SLOW_OPTIONS, *options])
    graph.__enter__()
    try:
        yield graph
    finally:
        assert graph.end(signal.SIGINT) in (0, -signal.SIGKILL)


async def test_every_rank_decides_and_receives_for_itself(ranks: Graph, reference: PlainServer):
    requests = longs(8, seed=1700)
    expected = await tokens_of(reference.url, requests)
    since = counting(ranks)
    assert await tokens_of(ranks.url, requests, 2) == expected
    assert since() == {"remote/long": len(requests)}
    async with EtcdStore(ranks.etcd_url) as store:
        keys = await store.get_prefix(names.nixl_metadata_prefix(NAMESPACE))
    engines = {key.rpartition("/")[2] for key in keys}
    assert {engine.rpartition("_")[2] for engine in engines} == {"dp0", "dp1"}
    async with ranks.messaging() as messaging:
        for engine in engines:
            subject = names.explain_subject(NAMESPACE, engine)
            reply = await messaging.request(subject, encode(Explain(last=99)), timeout_s=5.0)
            assert decode_explained(reply).decisions, f"{engine} had its share"
    assert json.loads(command(ranks, "top", "--json"))["failed_links"] == []
    await ranks.settled()


async def test_a_rank_that_dies_ends_no_answer_early(ranks: Graph):
    """vLLM ends the other rank as well, and calls its requests aborted. They are lost as those of
    the dead one are: answered whole by the worker that is started again, or with an error."""
    worker = ranks.process("VllmWorker")
    (rank,) = (p for p in descendants_of(worker.pid) if "VLLM::EngineCore_DP1" in command_line(p))
    body = {"model": "tiny", "max_tokens": 600, "ignore_eos": True, "return_token_ids": True}
    async with httpx.AsyncClient(base_url=ranks.url, timeout=120) as http:
        asking = [
            asyncio.create_task(
                http.post("/v1/completions", json={"prompt": prompt_ids(40 + i, 1720), **body})
            )
            for i in range(8)
        ]
        await reached(
            lambda: ranks.health("VllmWorker")["in_flight"] == len(asking),
            timeout_s=60,
            what="all are under way",
        )
        os.kill(rank, signal.SIGKILL)
        answers = await asyncio.gather(*asking)
    for answer in answers:
        assert answer.status_code != 200 or (
            len(answer.json()["choices"][0]["token_ids"]) == body["max_tokens"]
        ), answer.text[-200:]
    await reached(lambda: is_back(ranks, 0, worker.pid), timeout_s=180, what="it is back")
    await ranks.settled()


def test_no_process_outlives_a_killed_supervisor(ranks: Graph):
    """The last one: it ends the graph. vLLM's coordinator of the ranks would wait for ever."""
    family = ranks.descendants()
    os.kill(ranks.pid, signal.SIGKILL)
    eventually(
        lambda: not any(is_alive(pid) for pid in family), timeout_s=20, what="all have ended"
    )
