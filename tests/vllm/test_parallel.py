"""Engines that spread heads and layers, or write them, differently: plain vLLM's answers.

Workers of other parallelisms or block sizes join the shared graph, whose own have one rank each
and blocks of 32 tokens. Each is asked until it has had its share.
"""

import asyncio
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from dynamo_lite.disagg.attempts.ledger import Outcome
from tests.vllm.asking import prompt_ids, tokens_of
from tests.vllm.direct import Direct
from tests.vllm.graph import UNCOMPILED, Graph, Lone, PlainServer, together
from tests.vllm.test_decisions import LIMIT, REMOTE

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]

#: Prompts of each round: full and begun blocks, of 32 or 64 tokens, one chunk and several.
LENGTHS = (LIMIT + 1, LIMIT + 32, LIMIT + 33, 1037, 2081)
MAX_ROUNDS = 12
SHARE = 4
SEEDS = count(700)

#: Two ranks that compile what vLLM compiles even with enforce-eager, beside all others on a
#: small machine, can stop everything for longer than a lease lives.
TENSOR: dict[str, Any] = {
    "tensor-parallel-size": 2,
    **{f"ServiceArgs.env.{key}": value for key, value in UNCOMPILED.items()},
}
#: vLLM's CPU build runs stages behind the first only after its warm-up for compiled models.
PIPELINE: dict[str, Any] = {
    "pipeline-parallel-size": 2,
    "enforce-eager": False,
    "compilation-config": {"mode": 2, "backend": "eager", "ir_enable_torch_wrap": False},
}

OTHER_SIZE = {"block-size": 64}


def failures(*graphs: Graph) -> dict[str, float]:
    """Remote prefills that brought something else than they should, or were not written in time."""
    writers = (outcome for outcome in Outcome if outcome.name.startswith("WRITER_"))
    failed = [Outcome.CORRUPT, Outcome.DEADLINE, *writers]
    return {
        outcome.value: sum(
            graph.count("VllmWorker", REMOTE, outcome=outcome.value) for graph in graphs
        )
        for outcome in failed
    }


def reasons(*graphs: Graph) -> str:
    """The log lines of decode workers about failed remote prefills."""
    logs = [log for graph in graphs for log in graph.directory.glob("**/logs/VllmWorker-*.log")]
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    return "\n".join(line for line in lines if "attempt" in line)


async def test_answers_are_the_same_across_parallelism(
    disagg: Graph, reference: PlainServer, tmp_path: Path
):
    """The decode worker of two ranks is written to by the graph's own prefill worker, by one of
    two ranks, and, when that has left, by one of two stages. Idle ranks poll: more of them at a
    time would leave other processes of a small machine without its cores for seconds."""
    tensor = Lone(tmp_path / "tensor", "PrefillWorker", disagg.servers, TENSOR)
    pipeline = Lone(tmp_path / "pipeline", "PrefillWorker", disagg.servers, PIPELINE)
    decode = Lone(tmp_path / "decode", "VllmWorker", disagg.servers, TENSOR)
    before = failures(disagg)
    with together([tensor, decode]):
        await _ask_until([tensor, decode], disagg, reference)
        tensor.stop()
        with together([pipeline]):
            await _ask_until([pipeline], disagg, reference)
            assert failures(disagg, decode) == before, reasons(disagg, decode)
            joined = (tensor, pipeline, decode)
            assert not any(worker.errors() for worker in joined), [w.errors() for w in joined]
    await disagg.settled()


async def test_answers_are_the_same_across_block_sizes(
    disagg: Graph, reference: PlainServer, tmp_path: Path
):
    """A prefill worker with blocks of 64 tokens writes for the graph's decode worker. When it has
    left, the graph's own does for a decode worker with 64."""
    prefill = Lone(tmp_path / "prefill", "PrefillWorker", disagg.servers, OTHER_SIZE)
    decode = Lone(tmp_path / "decode", "VllmWorker", disagg.servers, OTHER_SIZE)
    before = failures(disagg)
    with together([prefill, decode]):
        await _ask_until([prefill], disagg, reference, of=disagg)
        prefill.stop()
        await _ask_until([decode], disagg, reference, of=decode)
        assert failures(disagg, decode) == before, reasons(disagg, decode)
        assert not prefill.errors() + decode.errors()
    await disagg.settled()


async def _ask_until(
    workers: list[Lone], disagg: Graph, reference: PlainServer, *, of: Graph | None = None
) -> None:
    """Each of these workers has had its share, and every answer was right.

    of: the graph whose decode worker alone is asked; None: whichever the Frontend chooses.
    """
    for _ in range(MAX_ROUNDS):
        seed = next(SEEDS)
        asked = [{"prompt": prompt_ids(n, seed), "max_tokens": 12} for n in LENGTHS]
        expected = await tokens_of(reference.url, asked)
        if of is None:
            assert await tokens_of(disagg.url, asked, concurrency=4) == expected
        else:
            lease = of.process("VllmWorker").lease
            async with Direct(disagg.etcd_url, lease=lease) as direct:
                answers = (direct.tokens(each["prompt"], max_tokens=12) for each in asked)
                assert await asyncio.gather(*answers) == expected
        if min(worker.handed_over() for worker in workers) >= SHARE:
            return
    assert min(worker.handed_over() for worker in workers) >= SHARE
