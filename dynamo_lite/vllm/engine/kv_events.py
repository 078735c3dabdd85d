"""Converts vLLM's KV events to changes of chain hashes.

EngineCore's scheduler publishes them, one batch per step, on a local ZeroMQ socket. They
name blocks by vLLM's hashes, which depend on vLLM's settings, and contain the tokens. They
are converted to hashes that a router can compute from a prompt; tokens are not passed on.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.asyncio
from vllm.config import KVEventsConfig, VllmConfig
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
)
from vllm.utils.network_utils import get_open_zmq_ipc_path

from dynamo_lite.policy.kv_chain import BlockHashes, root_hash
from dynamo_lite.protocol.kv import KvChange, KvCleared, KvRemoved, KvStored
from dynamo_lite.runtime.drops import OnDrop, uncounted

logger = logging.getLogger(__name__)

#: Batches that the socket queues while this process is busy.
_MAX_WAITING = 100_000


class VllmKvEvents:
    """Follows one engine. Implements `KvEvents`.

    Blocks whose KV depends on more than tokens, cache salt and LoRA adapter (images, prompt
    embeddings) get no hash, and neither do the blocks behind them. For a model with several
    groups of layers, only blocks of the first group are followed.
    """

    def __init__(self, on_drop: OnDrop = uncounted):
        self._engine: VllmConfig | None = None
        self._endpoint = get_open_zmq_ipc_path()
        self._on_drop = on_drop
        self._hashes = BlockHashes()
        self._next = 0
        self._decode = msgspec.msgpack.Decoder(KVEventBatch).decode

    def config(self) -> KVEventsConfig:
        """The configuration with which vLLM publishes to `changes`."""
        return KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=self._endpoint)

    def attach(self, engine: VllmConfig) -> bool:
        """Returns whether the engine can be followed: it must have exactly one prefix cache.

        If not, its events are turned off.
        """
        parallel, cache = engine.parallel_config, engine.cache_config
        if not cache.enable_prefix_caching or parallel.data_parallel_size > 1:
            engine.kv_events_config = None
            return False
        self._engine = engine
        return True

    @property
    def block_size_tokens(self) -> int:
        """Valid once the engine is up: its process may change the configured size."""
        assert self._engine is not None, "attach() comes first"
        return self._engine.cache_config.block_size

    def held(self) -> Sequence[int]:
        return self._hashes.held()

    def cuts(self) -> Sequence[int]:
        return self._hashes.cuts()

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
        try:
            _, number, payload = frames
            batch = self._decode(payload)
            position = int.from_bytes(number, "big")
        except (ValueError, msgspec.DecodeError) as exc:
            logger.warning("malformed batch of KV events dropped: %s", exc)
            return self._reset()
        changes = self._reset() if position != self._next else []
        self._next = position + 1
        for event in batch.events:
            if (change := self._change(event)) is not None:
                changes.append(change)
        return changes

    def _reset(self) -> list[KvChange]:
        self._on_drop("kv_event")
        self._hashes.clear()
        return [KvCleared()]

    def _change(self, event: KVCacheEvent) -> KvChange | None:
        match event:
            case BlockStored() if event.block_size == self.block_size_tokens and _is_first_group(
                event
            ):
                chain = self._stored(event)
                return KvStored(hashes=chain) if chain else None
            case BlockRemoved() if _is_first_group(event):
                gone, cut = self._hashes.removed(event.block_hashes)
                return KvRemoved(hashes=gone, cut=cut) if gone or cut else None
            case AllBlocksCleared():
                self._hashes.clear()
                return KvCleared()
            case _:
                return None

    def _stored(self, event: BlockStored) -> list[int]:
        root, count = _plain_blocks(event)
        if not count:
            return []
        try:
            chain = self._hashes.stored(
                event.block_hashes[:count],
                event.parent_block_hash,
                event.token_ids[: count * event.block_size],
                event.block_size,
                root,
            )
        except ValueError as exc:
            logger.warning("KV event dropped: %s", exc)
            chain = []
        if not chain:
            self._on_drop("kv_event")
        return chain


def _is_first_group(event: BlockStored | BlockRemoved) -> bool:
    """Whether the event is of the first group of layers."""
    return not event.group_idx


def _plain_blocks(event: BlockStored) -> tuple[int, int]:
    """The parent of a prompt's first block, and how many of the event's blocks get a hash."""
    salt: str | None = None
    keys = event.extra_keys or [None] * len(event.block_hashes)
    for count, own in enumerate(keys):
        rest: list[Any] = list(own or ())
        if event.lora_name is not None and event.lora_name in rest:
            rest.remove(event.lora_name)
        if rest and count == 0 and event.parent_block_hash is None and isinstance(rest[0], str):
            salt = rest.pop(0)
        if rest:
            return root_hash(salt, event.lora_name), count
    return root_hash(salt, event.lora_name), len(event.block_hashes)
