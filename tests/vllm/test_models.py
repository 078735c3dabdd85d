"""Models of other kinds, and one with drafts: their KV is handed over.

A pair of a decode and a prefill worker for each, in a namespace of its own and without a
Frontend. What is right is what the decode worker generates alone.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.asking import prompt_ids
from tests.vllm.direct import Direct
from tests.vllm.graph import MODEL, Graph, Lone, eventually, reached, sample_sum, together
from tests.vllm.models import model_of
from tests.vllm.test_decisions import BLOCK_BYTES, DECISIONS, LIMIT
from tests.vllm.test_prefix_read import COMPUTED

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]

#: vLLM's CPU kernels for MLA take blocks of 16 tokens and no other size; the other backend
#: of the CPU build runs on processors with AMX only.
OPTIONS = {
    "mla": {"block-size": 16, "attention-backend": "CPU_MLA"},
    "sliding": {},
    "eagle": {},
    "windows": {},
    "hybrid": {"dtype": "bfloat16"},
}
#: Tokens per step of prefill workers that are killed half-way: one block of the hybrid model, which
#: vLLM makes as large as a state.
STEP_TOKENS = {"eagle": 64, "windows": 64, "hybrid": 576}
#: Of the recipe's 128 tokens, one begun at either end. The blocks are as the demo model's.
WINDOW_BLOCKS = 128 // 32 + 2
LAYER_BYTES = BLOCK_BYTES // 4
#: Full and begun blocks; all beyond the sliding window.
LENGTHS = (LIMIT + 1, LIMIT + 32, 700, 1500)


def worker(directory: Path, model: str, service: str, servers: list[str]) -> Lone:
    """In the namespace that is called as the model."""
    made, changes = model_of(model), {**OPTIONS.get(model, {})}
    if model == "eagle":
        drafts = {"method": "eagle", "model": str(made), "num_speculative_tokens": 2}
        made, changes["speculative-config"] = MODEL, drafts
    if service == "PrefillWorker" and model in STEP_TOKENS:
        changes["max-num-batched-tokens"] = STEP_TOKENS[model]
    place = [f"--Common.model={made}", "--namespace", model, *servers]
    return Lone(directory / f"{model}-{service}", service, place, changes)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def workers(
    stage, tmp_path_factory: pytest.TempPathFactory, nats_url: str, etcd_url: str, model: str
) -> Iterator[tuple[Lone, ...]]:
    """Decode and prefill worker of one model: the engines of all would start for minutes."""
    stage.clear()
    directory = tmp_path_factory.mktemp("workers")
    servers = ["--nats-url", nats_url, "--etcd-url", etcd_url]
    pair = [worker(directory, model, name, servers) for name in ("VllmWorker", "PrefillWorker")]
    with together(pair):
        yield tuple(pair)


@pytest.mark.parametrize("model", list(OPTIONS), indirect=True)
async def test_a_remote_prefill_goes_on_as_the_decode_worker_alone(
    workers, etcd_url: str, model: str
):
    """The last token of the remote prompt is the first one that was generated alone, so
    that both compute it as a decoded token: vLLM's CPU kernels for MLA give the last token
    of a prompt other values. Nor do they bear several prompts in one step."""
    decode, prefill = workers
    prompts = [prompt_ids(tokens - 1, seed=1100 + tokens) for tokens in LENGTHS]
    async with Direct(etcd_url, model) as direct:
        alone = [await direct.tokens(prompt, local=True, max_tokens=13) for prompt in prompts]
        asked = [[*prompt, first] for prompt, (first, *_) in zip(prompts, alone, strict=True)]
        got = [await direct.tokens(prompt, max_tokens=12) for prompt in asked]
        assert got == [rest for _, *rest in alone]
    assert len({tuple(tokens) for tokens in got}) == len(got), "the answers tell prompts apart"
    count = len(prompts)
    eventually(
        lambda: prefill.handed_over() == count,
        timeout_s=10,
        what="all were written",
    )
    assert decode.count("VllmWorker", DECISIONS, reason="long", verdict="remote") == count
    assert decode.handed_over() == count
    assert not decode.errors() + prefill.errors()
    sent = prefill.count("PrefillWorker", "dynamo_lite_kv_transfer_bytes_total")
    if model == "windows":
        # All blocks of one layer, and those in the window of five.
        ends = [(-(-(tokens - 1) // 32), (tokens - 128) // 32) for tokens in LENGTHS]
        needed = sum(blocks + 5 * (blocks - passed) for blocks, passed in ends)
        assert needed <= sent / LAYER_BYTES <= 1.1 * needed
    if model == "sliding":
        assert 0 < sent <= count * WINDOW_BLOCKS * BLOCK_BYTES, "nothing before the window"


async def answer_of_killed(prefill: Graph, direct: Direct, prompt: list[int]) -> list[int]:
    """The tokens of a prompt whose prefill worker is killed half-way."""
    killed = prefill.process("PrefillWorker")
    before = sample_sum(killed.status_url, COMPUTED)
    answer = asyncio.create_task(direct.tokens(prompt, max_tokens=12))
    await reached(
        lambda: sample_sum(killed.status_url, COMPUTED) - before > 0.3 * len(prompt),
        timeout_s=60,
        what="a part of the prompt is computed",
    )
    assert not answer.done()
    os.kill(killed.pid, signal.SIGKILL)
    return await answer


@pytest.mark.parametrize("model", list(STEP_TOKENS), indirect=True)
async def test_a_prefill_worker_that_is_killed_half_way(workers, etcd_url: str, model: str):
    decode, prefill = workers
    prompt = prompt_ids(6000, seed=1150)
    async with Direct(etcd_url, model) as direct:
        alone = await direct.tokens(prompt, local=True, max_tokens=12)
        assert await answer_of_killed(prefill, direct, prompt) == alone
    assert decode.handed_over() == len(LENGTHS)
    assert not decode.errors()
