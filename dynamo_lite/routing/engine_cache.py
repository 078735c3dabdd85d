"""Converts vLLM's KV events into changes of chain hashes.

An engine publishes what its prefix cache stores and removes, a batch per step. Events name blocks
by vLLM's hashes, which depend on vLLM's settings, and contain the tokens. They are converted to
hashes that can be computed from a prompt; tokens are not kept. Source of the encoding: vLLM 0.32,
`distributed/kv_events.py`.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dynamo_lite.protocol.kv import KvChange, KvCleared, KvRemoved, KvStored
from dynamo_lite.routing.kv_chain import BlockHashes, root_hash

logger = logging.getLogger(__name__)

#: vLLM's name of a block.
Name = int | bytes
#: Medium of blocks on the device. Blocks of other media are in an offloading store.
_ON_DEVICE = (None, "GPU")


class BlockStored(msgspec.Struct, frozen=True, tag="BlockStored", gc=False):
    """Consecutive blocks are in the cache."""

    block_hashes: list[Name]
    #: None if the first block begins a prompt.
    parent_block_hash: Name | None
    #: The tokens of all the blocks.
    token_ids: list[int]
    #: In tokens.
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    #: What each block's hash depends on beside its tokens.
    extra_keys: list[list[Any] | None] | None = None
    #: Index of the group of layers, for a model with several groups.
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag="BlockRemoved", gc=False):
    """Blocks have left the cache."""

    block_hashes: list[Name]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag="AllBlocksCleared", gc=False):
    """The cache is empty."""


class KvBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The events of one step. ts: wall clock, in seconds."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


_decode = msgspec.msgpack.Decoder(KvBatch).decode


class EngineCache:
    """The blocks that one engine holds, according to its events.

    Blocks whose KV depends on more than tokens, cache salt and LoRA adapter (images, prompt
    embeddings) get no hash, and neither do the blocks behind them. For a model with several groups
    of layers, only blocks of the first group are followed. on_drop: an event could not be used.
    """

    def __init__(self, on_drop: Callable[[], None]):
        #: Block size in tokens; blocks of other sizes are ignored. 0: the size of the first block.
        self.block_size = 0
        self._on_drop = on_drop
        self._hashes = BlockHashes()

    def __len__(self) -> int:
        return len(self._hashes)

    def held(self) -> Sequence[int]:
        return self._hashes.held()

    def clear(self) -> list[KvChange]:
        self._hashes.clear()
        return [KvCleared()]

    def take(self, payload: bytes) -> list[KvChange]:
        """The changes of one batch. Raises ValueError for a malformed one; it changes nothing."""
        try:
            batch = _decode(payload)
        except msgspec.DecodeError as exc:
            raise ValueError(str(exc)) from exc
        changes = [self._change(event) for event in batch.events]
        return [change for change in changes if change is not None]

    def _change(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> KvChange | None:
        match event:
            case BlockStored() if _is_followed(event):
                self.block_size = self.block_size or event.block_size
                if event.block_size != self.block_size:
                    return None
                chain = self._stored(event)
                return KvStored(hashes=chain) if chain else None
            case BlockRemoved() if _is_followed(event):
                gone = self._hashes.removed(event.block_hashes)
                return KvRemoved(hashes=gone) if gone else None
            case AllBlocksCleared():
                return self.clear()[0]
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
            self._on_drop()
        return chain


def _is_followed(event: BlockStored | BlockRemoved) -> bool:
    """Whether the event is of the device's blocks for the first group of layers."""
    return not event.group_idx and event.medium in _ON_DEVICE


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
