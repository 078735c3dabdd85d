"""Follows the KV events of this worker's engine.

EngineCore's scheduler publishes them, one batch per step, on a local ZeroMQ socket.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Sequence
from urllib.parse import urlsplit

import zmq
import zmq.asyncio
from vllm.config import KVEventsConfig, VllmConfig
from vllm.utils.network_utils import get_open_zmq_ipc_path

from dynamo_lite.protocol.kv import KvChange
from dynamo_lite.routing.engine_cache import EngineCache
from dynamo_lite.runtime.drops import OnDrop, uncounted

logger = logging.getLogger(__name__)

#: Batches that the socket queues while this process is busy.
_MAX_WAITING = 100_000


def kv_events_config() -> KVEventsConfig:
    """The configuration with which vLLM publishes to `VllmKvEvents`, at a new endpoint."""
    return KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=get_open_zmq_ipc_path()
    )


def followed(engine: VllmConfig, on_drop: OnDrop = uncounted) -> "VllmKvEvents | None":
    """Returns what follows the engine, which must have exactly one prefix cache. If it does not,
    its events are turned off."""
    parallel, cache = engine.parallel_config, engine.cache_config
    if not cache.enable_prefix_caching or parallel.data_parallel_size > 1:
        engine.kv_events_config = None
        return None
    return VllmKvEvents(engine, on_drop)


class VllmKvEvents:
    """Follows one engine. Implements `KvEvents`. engine: with `kv_events_config`."""

    def __init__(self, engine: VllmConfig, on_drop: OnDrop):
        assert engine.kv_events_config is not None
        self._endpoint = engine.kv_events_config.endpoint
        self._engine, self._on_drop = engine, on_drop
        self._cache = EngineCache(lambda: on_drop("kv_event"))
        self._next = 0

    @property
    def block_size_tokens(self) -> int:
        """Valid once the engine is up: its process may change the configured size."""
        return self._engine.cache_config.block_size

    def held(self) -> Sequence[int]:
        return self._cache.held()

    async def changes(self) -> AsyncIterator[list[KvChange]]:
        """Yields one list per engine step that changed anything. The engine must be up."""
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.SUB)
        try:
            socket.setsockopt(zmq.RCVHWM, _MAX_WAITING)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(self._endpoint)
            while True:
                if changes := self.take(await socket.recv_multipart()):
                    yield changes
                    await asyncio.sleep(0)
        finally:
            context.destroy(linger=0)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(urlsplit(self._endpoint).path)

    def take(self, frames: Sequence[bytes]) -> list[KvChange]:
        """Returns the changes of one batch. After a malformed batch or a gap the content of the
        cache is unknown: the changes begin with `KvCleared`."""
        self._cache.block_size = self.block_size_tokens
        try:
            _, number, payload = frames
        except ValueError:
            logger.warning("malformed batch of KV events dropped: %d frames", len(frames))
            return self._reset()
        position = int.from_bytes(number, "big")
        changes = self._reset() if position != self._next else []
        self._next = position + 1
        try:
            return changes + self._cache.take(payload)
        except ValueError as exc:
            logger.warning("malformed batch of KV events dropped: %s", exc)
            return changes or self._reset()

    def _reset(self) -> list[KvChange]:
        self._on_drop("kv_event")
        return self._cache.clear()
