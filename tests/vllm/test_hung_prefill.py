"""A prefill engine that hangs: every answer is right, and no block is lost."""

import asyncio
import os
import signal

import pytest

from tests.vllm.asking import tokens_of
from tests.vllm.graph import Graph, PlainServer, eventually
from tests.vllm.slow import CLAIMS, QUEUE_SIZE, longs, outcomes, until, works_remotely
from tests.vllm.test_decisions import counting

pytestmark = pytest.mark.timeout(400)


async def test_a_hung_engine_costs_waiting_but_no_answer(slow: Graph, reference: PlainServer):
    """The worker is alive and claims, but nothing is computed. It reports itself as unhealthy,
    and no request waits for it any more. The blocks of its claimed attempts stay in quarantine
    until the engine has reported that it will not write."""
    waiting, more = longs(QUEUE_SIZE, seed=400), longs(1, seed=401)
    expected = await tokens_of(reference.url, [*waiting, *more])
    await slow.settled()
    free = (await slow.pools())[0].free_blocks
    silent, nobody = outcomes(slow, "writer_silent"), outcomes(slow, "no_writer")
    since = counting(slow)
    engine = slow.engine_pid("PrefillWorker")
    os.kill(engine, signal.SIGSTOP)
    try:
        stuck = asyncio.create_task(tokens_of(slow.url, waiting))
        await until(slow, lambda pool: pool.waiting == pool.queue_jobs == QUEUE_SIZE)
        assert await stuck == expected[:QUEUE_SIZE]
        assert outcomes(slow, "writer_silent") == silent + CLAIMS
        assert outcomes(slow, "no_writer") == nobody + QUEUE_SIZE - CLAIMS
        assert await tokens_of(slow.url, more) == expected[QUEUE_SIZE:]
        assert since() == {"remote/long": QUEUE_SIZE, "local/no_prefill_worker": 1}
        (pool,) = await slow.pools()
        assert pool.quarantined == CLAIMS and pool.free_blocks < free
        eventually(
            lambda: slow.count("VllmWorker", "dynamo_lite_quarantined_attempts") == CLAIMS,
            timeout_s=10,
            what="the quarantine shows in the metrics",
        )
    finally:
        os.kill(engine, signal.SIGCONT)
    await slow.settled(free)
    await works_remotely(slow, reference, seed=402)
