"""Engines whose blocks hold another number of tokens: plain vLLM's answers."""

import asyncio
from itertools import count
from pathlib import Path

import pytest

from tests.vllm.asking import prompt_ids, tokens_of
from tests.vllm.direct import Direct
from tests.vllm.graph import Graph, PlainServer, together
from tests.vllm.test_decisions import LIMIT
from tests.vllm.test_parallel import Joined, failures, reasons

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]

#: Full and begun blocks of either size, one chunk and several.
LENGTHS = (LIMIT + 1, LIMIT + 33, 1037, 2081)
MAX_ROUNDS = 12
SHARE = 4
SEEDS = count(1500)
OTHER = {"block-size": 64}


async def test_answers_are_the_same_across_block_sizes(
    disagg: Graph, reference: PlainServer, tmp_path: Path
):
    """A prefill worker with blocks of 64 tokens writes for the graph's decode worker, whose
    blocks hold 32. When it has left, the graph's own does for a decode worker with 64."""
    prefill = Joined(tmp_path / "prefill", disagg, "PrefillWorker", OTHER)
    decode = Joined(tmp_path / "decode", disagg, "VllmWorker", OTHER)
    before = failures(disagg)
    with together([prefill, decode]):
        await _ask_until(prefill, disagg, reference, of=disagg)
        prefill.stop()
        await _ask_until(decode, disagg, reference, of=decode)
        assert failures(disagg, decode) == before, reasons(disagg, decode)
        assert not prefill.errors() + decode.errors()
    await disagg.settled()


async def _ask_until(worker: Joined, disagg: Graph, reference: PlainServer, *, of: Graph) -> None:
    """The decode worker `of` a graph is asked until `worker` has had its share."""
    lease = of.process("VllmWorker").lease
    async with Direct(disagg.etcd_url, lease=lease, secret=disagg.run.secret) as direct:
        for _ in range(MAX_ROUNDS):
            seed = next(SEEDS)
            prompts = [prompt_ids(tokens, seed) for tokens in LENGTHS]
            asked = [{"prompt": prompt, "max_tokens": 12} for prompt in prompts]
            expected = await tokens_of(reference.url, asked)
            answers = (direct.tokens(prompt, max_tokens=12) for prompt in prompts)
            assert await asyncio.gather(*answers) == expected
            if worker.handed_over() >= SHARE:
                return
    assert worker.handed_over() >= SHARE
