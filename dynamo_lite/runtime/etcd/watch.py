"""A watch on a prefix that goes on after a disconnect.

It lists the prefix at revision r, then watches from r+1. etcd's own watches end with the
connection, ignore a start revision in the future (of a wiped server), and cannot replay
compacted revisions. So this watch lists the prefix again on every new connection.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator

from aetcd import rpc
from grpc.aio import EOF  # pyright: ignore[reportAttributeAccessIssue]

from dynamo_lite.runtime.etcd.client import EtcdClient
from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.runtime.store import Delete, Put, Snapshot, WatchEvent

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.5
_REFUSED_PAUSE_S = 1.0
#: With it a member that is partitioned from the others ends the stream.
_NEEDS_LEADER = ("hasleader", "true")
_UNREACHABLE = (rpc.AioRpcError, TimeoutError, EOFError)


def under(prefix: str) -> dict[str, bytes]:
    """All keys that begin with `prefix`, as fields of a request."""
    first = prefix.encode()
    # The first key after them; NUL: there is none. A prefix ends with no 0xFF, which UTF-8 lacks.
    after = first[:-1] + bytes([first[-1] + 1]) if first else b"\0"
    return {"key": first or b"\0", "range_end": after}


async def watch(client: EtcdClient, prefix: str) -> AsyncGenerator[WatchEvent]:
    """Endless. A cancelled wait for the next event ends it."""
    log_limit, pause_s = LogLimit(60.0), _FIRST_PAUSE_S
    while True:
        try:
            reply = await client.call(rpc.RangeRequest(**under(prefix)))
            pause_s = _FIRST_PAUSE_S
            yield Snapshot({text(kv.key): kv.value for kv in reply.kvs})
            async with contextlib.aclosing(_after(client, prefix, reply.header.revision)) as events:
                async for event in events:
                    yield event
        except _UNREACHABLE as exc:
            why = exc.details() if isinstance(exc, rpc.AioRpcError) else type(exc).__name__
            log_limit.log(logger, "watch on %s disconnected, retrying: %s", prefix, why)
        except asyncio.CancelledError:
            # gRPC also raises this for a call that it has cancelled itself.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
        except Exception:
            logger.exception("watch on %s failed; listing it again", prefix)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def _after(client: EtcdClient, prefix: str, revision: int) -> AsyncGenerator[WatchEvent]:
    """The events after `revision`, until the prefix must be listed again."""
    # With a request iterator gRPC would keep a task of its own for this call.
    metadata = (_NEEDS_LEADER, *(client.metadata or ()))
    call = rpc.WatchStub(client.channel).Watch(metadata=metadata)
    try:
        async with asyncio.timeout(client.timeout_s):
            create = rpc.WatchCreateRequest(**under(prefix), start_revision=revision + 1)
            await call.write(rpc.WatchRequest(create_request=create))
            response = await call.read()
        while response is not EOF and not response.canceled:
            for event in response.events:
                key = text(event.kv.key)
                put = event.type == rpc.Event.PUT
                yield Put(key, event.kv.value) if put else Delete(key)
            response = await call.read()
        if response is not EOF and not response.compact_revision:
            why = response.cancel_reason
            logger.error("etcd refuses the watch on %s, retrying: %s", prefix, why)
            await asyncio.sleep(_REFUSED_PAUSE_S)
    finally:
        call.cancel()


def text(key: bytes) -> str:
    return key.decode(errors="replace")
