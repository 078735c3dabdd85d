"""vLLM's OffloadingConnector beside the remote prefill, on both workers."""

import asyncio
import json
from collections.abc import Iterator

import pytest

from tests.vllm import host_tier
from tests.vllm.asking import prompt_ids
from tests.vllm.direct import Direct
from tests.vllm.graph import MODEL, Graph, Lone, eventually, together
from tests.vllm.live import command
from tests.vllm.test_decisions import DECISIONS, LIMIT, REMOTE
from tests.vllm.test_models import answer_of_killed
from tests.vllm.test_prefix_read import COMPUTED

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]

BLOCK = 32
#: Of each worker: room for two of the longest prompts.
BLOCKS = 400
NAMESPACE = "offload"


#: Engines that forget soon.
CHANGES = {
    "kv-transfer-config": host_tier.CONFIG,
    "num-gpu-blocks-override": BLOCKS,
    "max-num-batched-tokens": 256,
}


def last_decision(decode: Graph) -> dict:
    [last] = json.loads(command(decode, "explain", "--last", "1", "--json"))
    return last


@pytest.fixture(scope="module")
def workers(
    stage, tmp_path_factory: pytest.TempPathFactory, nats_url: str, etcd_url: str
) -> Iterator[tuple[Lone, Lone]]:
    stage.clear()
    directory = tmp_path_factory.mktemp("offload")
    place = [f"--Common.model={MODEL}", "--namespace", NAMESPACE]
    place += ["--nats-url", nats_url, "--etcd-url", etcd_url]
    decode = Lone(
        directory / "decode", "VllmWorker", place, {**CHANGES, "max-prefill-queue-size": 16}
    )
    prefill = Lone(directory / "prefill", "PrefillWorker", place, CHANGES)
    with together([decode, prefill]):
        yield decode, prefill


async def forget(direct: Direct, seed: int) -> None:
    """Both engines' own caches lose everything else."""
    for number in range(6):
        await direct.tokens(prompt_ids(4500, seed=seed + number), max_tokens=2)


async def test_what_is_offloaded_counts_as_cached(workers, etcd_url: str):
    decode, prefill = workers
    first = prompt_ids(LIMIT + 700, seed=1900)
    longer = first + prompt_ids(LIMIT + 300, seed=1901)
    async with Direct(etcd_url, NAMESPACE) as direct:
        alone = [await direct.tokens(p, local=True) for p in (first, longer)]
        assert await direct.tokens(first) == alone[0]
        assert last_decision(decode)["verdict"] == "remote"
        await forget(direct, seed=1910)
        assert await direct.tokens(first) == alone[0], "loaded by the decode worker"
        again = last_decision(decode)
        assert (again["verdict"], again["reason"]) == ("local", "cached"), again
        held = again["cached_tokens"] + again["offloaded_tokens"]
        assert again["offloaded_tokens"] > 0 and len(first) - held <= BLOCK, again
        await forget(direct, seed=1920)
        computed = prefill.count("PrefillWorker", COMPUTED)
        assert await direct.tokens(longer) == alone[1], "loaded by the prefill worker"
        last = last_decision(decode)
        assert (last["verdict"], last["reason"]) == ("remote", "long"), last
        assert last["offloaded_tokens"] > 0, last
        eventually(
            lambda: 0 < prefill.count("PrefillWorker", COMPUTED) - computed < LIMIT + 400,
            timeout_s=5,
            what="the prefill worker has computed the rest",
        )
    assert not decode.errors() + prefill.errors()


async def test_what_is_saved_is_right_where_blocks_are_used_again_at_once(workers, etcd_url: str):
    """A prefill worker must not write into blocks that are being saved for the prompt before."""
    decode, prefill = workers
    prompts = [prompt_ids(LIMIT + 1000 + 32 * n, seed=1930 + n) for n in range(16)]
    remote = decode.count("VllmWorker", DECISIONS, verdict="remote")
    async with Direct(etcd_url, NAMESPACE) as direct:
        alone = [await direct.tokens(p, local=True, max_tokens=4) for p in prompts]
        for _ in range(3):
            got = await asyncio.gather(*(direct.tokens(p, max_tokens=4) for p in prompts))
            assert got == alone
    assert decode.count("VllmWorker", DECISIONS, verdict="remote") >= remote + len(prompts)
    assert decode.count("VllmWorker", DECISIONS, reason="cached", verdict="local") > 1
    assert not decode.errors() + prefill.errors()


async def test_a_prefill_worker_that_is_killed_half_way(workers, etcd_url: str):
    decode, prefill = workers
    prompt = prompt_ids(6000, seed=1950)
    lost = decode.count("VllmWorker", REMOTE)
    async with Direct(etcd_url, NAMESPACE) as direct:
        alone = await direct.tokens(prompt, local=True, max_tokens=12)
        assert await answer_of_killed(prefill, direct, prompt) == alone
        assert decode.count("VllmWorker", REMOTE) == lost + 1
        await forget(direct, seed=1960)
        assert await direct.tokens(prompt, max_tokens=12) == alone, "from the tier"
    assert not decode.errors()
