"""The part of a decode worker's engine in a remote prefill, for prefill workers that are real."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from dynamo_lite.disagg.queue.base import PrefillQueue, QueueConfig
from dynamo_lite.disagg.queue.jetstream import open_queue
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.prefill import (
    ClaimRefused,
    Granted,
    StayAccepted,
    StayRefused,
    WriterDone,
    decode_claim,
    decode_writer_done,
    decode_writer_stays,
)
from dynamo_lite.protocol.records import encode_engine
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from tests.builders import engine_metadata, grant_for, prefill_job

ENGINE = "e1"
#: Longer than a push takes on a busy machine; nothing here depends on it.
PUSH_TIMEOUT_S = 10.0


@asynccontextmanager
async def decode_engine(
    *,
    nats_url: str,
    etcd_url: str,
    namespace: str,
    done: asyncio.Queue[WriterDone],
    engine_id: str = ENGINE,
    config: QueueConfig | None = None,
    holders: dict[str, int] | None = None,
    promised: set[tuple[str, int]] | None = None,
) -> AsyncIterator[PrefillQueue]:
    """Grants every claim of an attempt on this engine that is not over, accepts the promises of
    writers that leave, and puts what the writers say at the end into `done`. Yields its queue.

    holders: has, for each attempt that is claimed and not over, the lease of its writer. promised:
    gets the attempt and the lease of each promise that is accepted.
    """
    held: dict[str, int] = {} if holders is None else holders
    kept: set[tuple[str, int]] = set() if promised is None else promised
    over: set[str] = set()

    async def claim(payload: bytes) -> bytes:
        asked = decode_claim(payload)
        if asked.attempt in over:
            # Its writer was killed between its last message and the acknowledgement of the job.
            return encode(ClaimRefused(reason="unknown or ended attempt"))
        held[asked.attempt] = asked.writer_lease_id
        grant = grant_for(asked, prefill_job(asked.attempt, engine_id=engine_id))
        return encode(Granted(grant=grant))

    async def stays(payload: bytes) -> bytes:
        said = decode_writer_stays(payload)
        if held.get(said.attempt) != said.writer_lease_id:
            return encode(StayRefused(reason="another writer holds it"))
        kept.add((said.attempt, said.writer_lease_id))
        return encode(StayAccepted())

    async def ended(payload: bytes) -> None:
        said = decode_writer_done(payload)
        if held.get(said.attempt) == said.writer_lease_id:
            del held[said.attempt]
            over.add(said.attempt)
        done.put_nowait(said)

    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        store = await enter(EtcdStore(etcd_url))
        messaging = await enter(NatsMessaging(nats_url))
        for subject, handler in (
            (names.claim_subject, claim),
            (names.writer_stays_subject, stays),
            (names.writer_done_subject, ended),
        ):
            await enter(messaging.serve(subject(namespace, engine_id), handler))
        lease = await enter(store.lease(30))
        metadata = engine_metadata(engine_id, lease.id, num_blocks=16)
        key = names.nixl_metadata_key(namespace, engine_id)
        await store.put(key, encode_engine(metadata), lease=lease)
        config = config or QueueConfig(push_timeout_s=PUSH_TIMEOUT_S)
        yield await enter(open_queue(nats_url, namespace, config))
