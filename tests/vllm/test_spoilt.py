"""A byte that changes between a writer's NIXL write and the decode engine's look at it.

Every process that has an engine's metadata can write into its blocks. This test does so while the
writer computes a later chunk of the same prompt.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode_sealed
from dynamo_lite.protocol.prefill import Listen, RemotePrefillRequest, decode_job
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.runtime.secret import TAG_BYTES
from dynamo_lite.transfer.nixl import NixlMover
from tests.vllm.asking import tokens_of
from tests.vllm.graph import NAMESPACE, Graph, PlainServer, eventually
from tests.vllm.slow import longs, outcomes, throttled, works_remotely
from tests.vllm.test_decisions import counting
from tests.vllm.test_slow_prefill import MISMATCHES

pytestmark = pytest.mark.timeout(300)

WRITES = "dynamo_lite_kv_transfer_seconds_count"
_LISTEN_S = 10.0
_MOVED_S = 20.0


class Spoiler:
    """A NIXL agent that knows one rank of a decode engine."""

    def __init__(self, engine: EngineMetadata):
        [self._rank] = engine.ranks
        self._byte = np.zeros(1, np.uint8)
        self._mover = NixlMover("spoiler")
        self._mover.register([(self._byte.ctypes.data, 1)], "DRAM", 0)
        self._mover.add_peer("engine", self._rank.agent)

    async def meet(self, messaging: Messaging, engine_id: str) -> None:
        """Connects. The engine must make progress for that; an idle engine does so after
        `Listen`."""
        subject = names.listen_subject(NAMESPACE, engine_id)
        listen = Listen(writer_lease_id=1, for_s=_LISTEN_S)
        await messaging.request(subject, encode_sealed(listen), timeout_s=5.0)
        assert self._rank.scratch is not None
        await self._move("read", self._rank.scratch.base)

    async def spoil(self, block: int) -> None:
        """Changes the first byte of the block's last layer."""
        region = self._rank.regions[-1]
        address = region.base + block * region.stride_bytes
        await self._move("read", address)
        self._byte ^= 0xFF
        await self._move("write", address)

    def close(self) -> None:
        self._mover.close()

    async def _move(self, what: str, address: int) -> None:
        here = np.array([[self._byte.ctypes.data, 1, 0]], dtype=np.uint64)
        there = np.array([[address, 1, self._rank.device]], dtype=np.uint64)
        move = self._mover.read if what == "read" else self._mover.write
        moving = move("engine", here, there, memory=("DRAM", self._rank.memory))
        async with asyncio.timeout(_MOVED_S):
            while not moving.done():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def jobs_of(graph: Graph) -> AsyncIterator[list[RemotePrefillRequest]]:
    """Those that are sent to the queue meanwhile."""
    jobs: list[RemotePrefillRequest] = []
    subject = names.prefill_jobs_subject(NAMESPACE)

    async def on_job(message) -> None:
        jobs.append(decode_job(message.data[TAG_BYTES:]))

    async with NatsMessaging(graph.nats_url) as messaging:
        for wanted in (subject, f"{subject}.>"):
            await messaging.client.subscribe(wanted, cb=on_job)
        await messaging.client.flush()
        yield jobs


async def test_a_spoilt_byte_is_found_and_the_prompt_computed_here(
    slow: Graph, reference: PlainServer
):
    requests = longs(1, seed=1300, tokens=2000)
    expected = await tokens_of(reference.url, requests)
    await works_remotely(slow, reference, seed=1301)
    await slow.settled()
    (engine,) = await slow.pools()
    before = {how: outcomes(slow, how) for how in ("corrupt", "committed")}
    since, mismatches = counting(slow), slow.count("VllmWorker", MISMATCHES)
    writes = slow.count("PrefillWorker", WRITES)
    spoiler = Spoiler(engine.metadata)
    try:
        async with slow.messaging() as messaging, jobs_of(slow) as jobs:
            await spoiler.meet(messaging, engine.metadata.engine_id)
            with throttled(slow.engine_pid("PrefillWorker")):
                asking = asyncio.create_task(tokens_of(slow.url, requests))
                await asyncio.to_thread(
                    eventually,
                    lambda: slow.count("PrefillWorker", WRITES) > writes,
                    timeout_s=20,
                    what="the first block is written",
                )
                await spoiler.spoil(jobs[0].block_ids[0])
                (pool,) = await slow.pools()
                assert pool.waiting == 1, "the last block is not"
            assert await asking == expected
    finally:
        spoiler.close()
    assert since() == {"remote/long": 1}
    assert outcomes(slow, "corrupt") == before["corrupt"] + 1
    assert outcomes(slow, "committed") == before["committed"]
    assert slow.count("VllmWorker", MISMATCHES) == mismatches + 1
    await slow.settled(engine.free_blocks)
    await works_remotely(slow, reference, seed=1302)
