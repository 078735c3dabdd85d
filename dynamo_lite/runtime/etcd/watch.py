"""A watch on a prefix that goes on after a disconnect.

It lists the prefix at revision r, then watches from r+1. etcd's own watches end with the
connection, ignore a start revision in the future (of a wiped server), and cannot replay
compacted revisions. So this watch lists the prefix again on every new connection.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Any

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


class EtcdWatch:
    """`events` is for one task."""

    def __init__(self, client: EtcdClient, prefix: str):
        self._client = client
        self._prefix = prefix
        self._log_limit = LogLimit(60.0)

    async def events(self) -> AsyncGenerator[WatchEvent]:
        """Endless. A cancelled wait for the next event ends it."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                reply = await self._client.call(rpc.RangeRequest(**under(self._prefix)))
                pause_s = _FIRST_PAUSE_S
                yield Snapshot({text(kv.key): kv.value for kv in reply.kvs})
                async with contextlib.aclosing(self._after(reply.header.revision)) as events:
                    async for event in events:
                        yield event
            except _UNREACHABLE as exc:
                why = exc.details() if isinstance(exc, rpc.AioRpcError) else type(exc).__name__
                said = "watch on %s disconnected, retrying: %s"
                self._log_limit.log(logger, said, self._prefix, why)
            except asyncio.CancelledError:
                # gRPC also raises this for a call that it has cancelled itself.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
            except Exception:
                logger.exception("watch on %s failed; listing it again", self._prefix)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _after(self, revision: int) -> AsyncGenerator[WatchEvent]:
        """The events after `revision`, until the prefix must be listed again."""
        # With a request iterator gRPC would keep a task of its own for this call.
        metadata = (_NEEDS_LEADER, *(self._client.metadata or ()))
        call = rpc.WatchStub(self._client.channel).Watch(metadata=metadata)
        try:
            async with asyncio.timeout(self._client.timeout_s):
                create = rpc.WatchCreateRequest(**under(self._prefix), start_revision=revision + 1)
                await call.write(rpc.WatchRequest(create_request=create))
                response = await call.read()
            while response is not EOF:
                if response.canceled:
                    await self._on_refused(response)
                    return
                for event in response.events:
                    key = text(event.kv.key)
                    put = event.type == rpc.Event.PUT
                    yield Put(key, event.kv.value) if put else Delete(key)
                response = await call.read()
        finally:
            call.cancel()

    async def _on_refused(self, response: Any) -> None:
        if response.compact_revision:
            return
        why = response.cancel_reason
        logger.error("etcd refuses the watch on %s, retrying: %s", self._prefix, why)
        await asyncio.sleep(_REFUSED_PAUSE_S)


def text(key: bytes) -> str:
    return key.decode(errors="replace")
