"""The part of a decode worker's engine in a remote prefill, for prefill workers that are real."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from dynamo_lite.disagg.attempts.ledger import CLAIM_S
from dynamo_lite.disagg.queue.base import PrefillQueue, QueueConfig
from dynamo_lite.disagg.queue.jetstream import open_queue
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.prefill import ClaimRefused, Done, Held, decode_claim, decode_done
from dynamo_lite.protocol.records import encode_engine
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.nats.open import open_messaging
from tests.builders import engine_metadata

ENGINE = "e1"
#: Longer than a push takes on a busy machine; nothing here depends on it.
PUSH_TIMEOUT_S = 10.0


@asynccontextmanager
async def decode_engine(
    *,
    nats_url: str,
    etcd_url: str,
    namespace: str,
    secret: Path,
    done: asyncio.Queue[Done],
    engine_id: str = ENGINE,
    config: QueueConfig | None = None,
    holders: dict[str, int] | None = None,
    renewed: set[tuple[str, int]] | None = None,
) -> AsyncIterator[PrefillQueue]:
    """Holds every attempt on this engine that is not over for the first claim of it, and puts what
    the writers say at the end into `done`. Yields its queue.

    holders: has, for each attempt that is claimed and not over, the lease of its writer. renewed:
    gets the attempt and the lease of its writer when a claim is renewed.
    """
    held: dict[str, int] = {} if holders is None else holders
    kept: set[tuple[str, int]] = set() if renewed is None else renewed
    claims: dict[str, int] = {}
    over: set[str] = set()
    renewable: set[str] = set()

    async def claim(payload: bytes) -> bytes:
        asked = decode_claim(payload)
        if asked.attempt in over:
            return encode(ClaimRefused(reason="unknown or ended attempt"))
        if claims.setdefault(asked.attempt, asked.claim) != asked.claim:
            return encode(ClaimRefused(reason="claimed by another writer"))
        writer = asked.writer_lease_id
        if held.setdefault(asked.attempt, writer) == writer and asked.attempt in renewable:
            kept.add((asked.attempt, writer))
        renewable.add(asked.attempt)
        return encode(Held(for_s=CLAIM_S))

    async def ended(payload: bytes) -> None:
        said = decode_done(payload)
        if claims.get(said.attempt) == said.claim:
            held.pop(said.attempt, None)
            over.add(said.attempt)
        done.put_nowait(said)

    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        store = await enter(EtcdStore(etcd_url))
        messaging = await enter(open_messaging(nats_url, str(secret)))
        for subject, handler in (
            (names.claim_subject, claim),
            (names.done_subject, ended),
        ):
            await enter(messaging.serve(subject(namespace, engine_id), handler))
        lease = await enter(store.lease(30))
        metadata = engine_metadata(engine_id, lease.id, num_blocks=16)
        key = names.nixl_metadata_key(namespace, engine_id)
        await store.put(key, encode_engine(metadata), lease=lease)
        config = config or QueueConfig(push_timeout_s=PUSH_TIMEOUT_S)
        yield await enter(open_queue(nats_url, namespace, config, str(secret)))
