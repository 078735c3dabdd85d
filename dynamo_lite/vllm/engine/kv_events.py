"""Follows the KV events of this worker's engine, and converts them into changes of chain hashes.

EngineCore's scheduler publishes what its prefix cache stores and removes, one batch per step, on a
local ZeroMQ socket. Events name blocks by vLLM's hashes, which depend on vLLM's settings, and
contain the tokens. They are converted to hashes that can be computed from a prompt.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.asyncio
from vllm.config import VllmConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from dynamo_lite.protocol.kv import KvChange, KvCleared, KvRemoved, KvStored
from dynamo_lite.routing.kv_chain import ChainHash, extend, root_hash
from dynamo_lite.runtime.drops import OnDrop

logger = logging.getLogger(__name__)

#: Batches that the socket queues while this process is busy.
_MAX_WAITING = 100_000
#: Medium of blocks on the device. Blocks of other media are in an offloading store.
_ON_DEVICE = (None, "GPU")

#: vLLM's kinds of KV groups that keep the KV of all tokens.
_WHOLE = ("full_attention", "mla_attention", "sink_full_attention")

_decode = msgspec.msgpack.Decoder(KVEventBatch).decode


class VllmKvEvents:
    """The blocks that one engine holds, according to its events. Implements `KvEvents`.

    Blocks whose KV depends on more than tokens, cache salt and LoRA adapter (images, prompt
    embeddings) get no hash, and neither do the blocks behind them. Of a model with several KV
    groups one is followed, see `follow`. engine: its configuration, with `kv_events_config`.
    """

    def __init__(self, engine: VllmConfig, on_drop: OnDrop):
        assert engine.kv_events_config is not None
        self._endpoint = engine.kv_events_config.endpoint
        self._engine, self._on_drop = engine, on_drop
        #: By vLLM's name of a block: its hash, and how often it is held. vLLM reports a block that
        #: it holds twice each time; it is gone when it was removed as often.
        self._held: dict[int | bytes, tuple[ChainHash, int]] = {}
        self._next = self._group = 0

    def follow(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Chooses the KV group whose blocks are followed: one that keeps all of a prompt's.

        groups: vLLM's description of each, in their order.
        """
        size = self.block_size_tokens
        whole = (
            number
            for number, group in enumerate(groups)
            if group["kind"] in _WHOLE and group["block_size"] == size
        )
        self._group = next(whole, 0)

    @property
    def block_size_tokens(self) -> int:
        """Valid once the engine is up: its process may change the configured size."""
        return self._engine.cache_config.block_size

    def held(self) -> Sequence[ChainHash]:
        return [chain for chain, _ in self._held.values()]

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
            batch = _decode(payload)
        except (ValueError, msgspec.DecodeError) as exc:
            logger.warning("malformed batch of KV events dropped: %s", exc)
            self._next += 1
            return self._missed()
        position = int.from_bytes(number, "big")
        changes = self._missed() if position != self._next else []
        self._next = position + 1
        made = (self._change(event) for event in batch.events)
        return changes + [change for change in made if change is not None]

    def _missed(self) -> list[KvChange]:
        self._on_drop("kv_event")
        return [self._clear()]

    def _clear(self) -> KvCleared:
        self._held.clear()
        return KvCleared()

    def _change(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> KvChange | None:
        if isinstance(event, AllBlocksCleared):
            return self._clear()
        if (event.group_idx or 0) != self._group or event.medium not in _ON_DEVICE:
            return None
        if isinstance(event, BlockRemoved):
            gone = self._removed(event.block_hashes)
            return KvRemoved(hashes=gone) if gone else None
        # Of a window's blocks vLLM names those that it keeps, which may be none.
        if event.block_size != self.block_size_tokens or not event.block_hashes:
            return None
        chain = self._stored(event)
        return KvStored(hashes=chain) if chain else None

    def _stored(self, event: BlockStored) -> list[ChainHash]:
        """Enters consecutive blocks, and returns their hashes; none behind a block that has none.
        Drops an event whose tokens and blocks do not fit."""
        salt, count = _plain_blocks(event)
        if not count:
            return []
        parent, chain = root_hash(salt, event.lora_name), list[ChainHash]()
        if (name := event.parent_block_hash) is not None:
            if name not in self._held:
                return []
            parent, _ = self._held[name]
        if len(event.token_ids) == len(event.block_hashes) * event.block_size:
            with contextlib.suppress(ValueError):
                chain = extend(parent, event.token_ids, event.block_size)[:count]
        if not chain:
            self._on_drop("kv_event")
        for name, made in zip(event.block_hashes, chain, strict=False):
            self._held[name] = made, self._held.get(name, (made, 0))[1] + 1
        return chain

    def _removed(self, names: Sequence[int | bytes]) -> list[ChainHash]:
        """Returns the blocks that are now gone. Unknown names are ignored."""
        gone: list[ChainHash] = []
        for name in names:
            chain, count = self._held.pop(name, (0, 0))
            if count > 1:
                self._held[name] = chain, count - 1
            elif count:
                gone.append(chain)
        return gone


def _plain_blocks(event: BlockStored) -> tuple[str | None, int]:
    """The cache salt of a prompt's first block, and how many of the event's blocks get a hash."""
    salt, blocks = None, len(event.block_hashes)
    # Those of a block begin with the name of its LoRA adapter.
    own = 0 if event.lora_name is None else 1
    keys = [list(each or ())[own:] for each in event.extra_keys or [()] * blocks]
    if event.parent_block_hash is None and len(keys[0]) == 1 and isinstance(keys[0][0], str):
        salt = keys[0].pop()
    return salt, next((count for count, each in enumerate(keys) if each), blocks)
