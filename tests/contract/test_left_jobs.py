"""Prefill workers of one queue, some without a usable link to the decode engine: on JetStream."""

import asyncio
import time
from contextlib import AsyncExitStack

import pytest
from prometheus_client import CollectorRegistry

from dynamo_lite.disagg.prefill.jobs import PrefillJobs
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode, encode_sealed
from dynamo_lite.protocol.prefill import Granted, decode_claim, decode_writer_done
from dynamo_lite.protocol.records import encode_engine
from dynamo_lite.queue.base import QueueConfig
from dynamo_lite.queue.jetstream import JetStreamQueue
from dynamo_lite.runtime.permits import CELLS_OF_PERMIT, Permits
from dynamo_lite.transfer.directory import MetadataDirectory
from tests.builders import ENGINE, NAMESPACE, grant_for, prefill_job
from tests.simulation.servers.memory import MemoryMessaging, MemoryStore
from tests.unit.prefill_rig import (
    TARGET,
    ScriptedEngine,
    ScriptedLinks,
)

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

JOBS, FIT, UNFIT = 12, 0xF, 0xBAD


async def test_idle_fit_workers_get_each_job_soon(nats_url: str, namespace: str):
    messaging, store = MemoryMessaging(), MemoryStore()
    config = QueueConfig()
    await store.put(names.nixl_metadata_key(NAMESPACE, ENGINE), encode_engine(TARGET))
    told: list[tuple[str, int, str]] = []
    came = asyncio.Event()

    async def claim(payload: bytes) -> bytes:
        claim = decode_claim(payload)
        return encode(Granted(grant=grant_for(claim, prefill_job(claim.attempt))))

    async def done(payload: bytes) -> None:
        said = decode_writer_done(payload)
        told.append((said.attempt, said.writer_lease_id, said.outcome))
        came.set()

    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context

        async def open_queue() -> JetStreamQueue:
            subject = names.prefill_jobs_subject(namespace)
            stream = names.prefill_stream(namespace)
            return await enter(
                JetStreamQueue(nats_url, stream=stream, subject=subject, config=config)
            )

        async def work(lease_id: int, why_not: str) -> PrefillJobs:
            cells = [0] * (2 * CELLS_OF_PERMIT)
            jobs = PrefillJobs(
                namespace=NAMESPACE,
                lease_id=lease_id,
                ack_wait_s=10.0,
                queue=await open_queue(),
                engine=ScriptedEngine(cells),
                permits=Permits(cells),
                directory=MetadataDirectory(store, NAMESPACE),
                messaging=messaging,
                registry=CollectorRegistry(),
                links=ScriptedLinks(why_not),
            )
            for _ in range(2):
                task = asyncio.create_task(jobs.run())
                stack.push_async_callback(asyncio.wait_for, task, 10)
            stack.push_async_callback(jobs.stop)
            return jobs

        await enter(messaging.serve(names.claim_subject(NAMESPACE, ENGINE), claim))
        await enter(messaging.serve(names.writer_done_subject(NAMESPACE, ENGINE), done))
        decode = await open_queue()
        await work(UNFIT, "rank 0: connection reset")
        await work(FIT, "")
        slowest_s = 0.0
        for number in range(JOBS):
            came.clear()
            began = time.monotonic()
            attempt = f"a{number}"
            await decode.push(
                encode_sealed(prefill_job(attempt)),
                message_id=attempt,
                lane=config.lane_of(10, 0),
            )
            async with asyncio.timeout(10):
                await came.wait()
            slowest_s = max(slowest_s, time.monotonic() - began)
    # A job that only the unfit worker has pulled is reported to the engine, and requested again.
    assert {writer for _, writer, outcome in told if outcome == "written"} == {FIT}
    assert {writer for _, writer, outcome in told if outcome == "failed"} <= {UNFIT}
    assert len(told) == JOBS
    assert slowest_s < 1.5
