"""KV events of stock engines, published by vLLM's own publisher."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher

from tests.ports import reserved_port

BLOCK = 16


class Publisher:
    """An engine's KV events. What vLLM would name blocks is made up."""

    def __init__(self, *, replays: bool = True):
        self.ports = reserved_port(), reserved_port() if replays else 0
        self._names = itertools.count(1)
        self.named: dict[tuple[int, ...], int] = {}
        self.start()

    @property
    def options(self) -> dict[str, str]:
        events, replay = (f"tcp://127.0.0.1:{port}" for port in self.ports)
        return {"kv_events": events} | ({"kv_replay": replay} if self.ports[1] else {})

    def start(self) -> None:
        events, replay = (f"tcp://*:{port}" for port in self.ports)
        self.publisher = ZmqEventPublisher(0, events, replay if self.ports[1] else None)

    def stop(self) -> None:
        self.publisher.shutdown()

    def publish(self, *events: Any) -> None:
        self.publisher.publish(KVEventBatch(ts=1.0, events=list(events)))

    def idle(self) -> bool:
        """Whether everything was sent."""
        return not self.publisher._event_queue.unfinished_tasks

    def lose(self, *events: Any) -> None:
        """A batch that no subscriber gets, only a replay has it."""
        batch = KVEventBatch(ts=1.0, events=list(events), data_parallel_rank=0)
        number = next(self.publisher._seq_gen)
        self.publisher._buffer.append((number, msgspec.msgpack.encode(batch)))

    def stored(self, text: str) -> BlockStored:
        ids = [ord(letter) for letter in text]
        ends = range(BLOCK, len(ids) + 1, BLOCK)
        names = [self.named.setdefault(tuple(ids[:end]), next(self._names)) for end in ends]
        return BlockStored(
            block_hashes=list(names),
            parent_block_hash=None,
            token_ids=ids[: len(names) * BLOCK],
            block_size=BLOCK,
            lora_id=None,
            medium="GPU",
            lora_name=None,
        )

    def removed(self, text: str) -> BlockRemoved:
        """All blocks of a text, the last one first."""
        names = self.stored(text).block_hashes
        return BlockRemoved(block_hashes=names[::-1], medium="GPU")


@contextmanager
def publishing(count: int, **options: Any) -> Iterator[list[Publisher]]:
    publishers = [Publisher(**options) for _ in range(count)]
    try:
        yield publishers
    finally:
        for publisher in publishers:
            publisher.stop()
