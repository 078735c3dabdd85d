"""A prefill worker that is slow, but works: what reaches its time limit there."""

import asyncio

import pytest

from tests.vllm.asking import tokens_of
from tests.vllm.graph import Graph, PlainServer
from tests.vllm.live import live_options
from tests.vllm.slow import longs, outcomes, throttled, until, works_remotely
from tests.vllm.test_decisions import counting
from tests.vllm.test_prefix_read import COMPUTED

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("slow")]

MISMATCHES = "dynamo_lite_commit_mismatches_total"


async def free_blocks(graph: Graph) -> int:
    await graph.settled()
    return (await graph.pools())[0].free_blocks


async def test_a_remote_prefill_beyond_its_deadline_is_made_good_here(
    slow: Graph, reference: PlainServer
):
    """The writer is alive, and computes the prompt when its time is up. It stops, and until
    then its blocks are not reused. Answers to other requests are right, too."""
    (late,), others = longs(1, seed=1240, tokens=3000), longs(3, seed=1241, tokens=300)
    expected = await tokens_of(reference.url, [late, *others])
    await works_remotely(slow, reference, seed=1242)
    free, since = await free_blocks(slow), counting(slow)
    deadline, mismatches = outcomes(slow, "deadline"), slow.count("VllmWorker", MISMATCHES)
    with live_options(slow, {"VllmWorker.remote-prefill-timeout-s": 2}):
        computed = slow.count("PrefillWorker", COMPUTED)
        with throttled(slow.engine_pid("PrefillWorker")):
            asking = asyncio.create_task(tokens_of(slow.url, [late]))
            await until(slow, lambda pool: pool.waiting == 1)
            await until(slow, lambda pool: pool.waiting == 0)
            assert outcomes(slow, "deadline") == deadline + 1
            answers = await tokens_of(slow.url, others), await asking
        assert answers == (expected[1:], expected[:1])
        await slow.settled(free)
    assert since() == {"remote/long": 1, "local/short": 3}
    written = slow.count("PrefillWorker", COMPUTED) - computed
    assert 0 < written < 3000 - 1, "it was amid the prompt"
    assert slow.count("VllmWorker", MISMATCHES) == mismatches
    await works_remotely(slow, reference, seed=1243)
