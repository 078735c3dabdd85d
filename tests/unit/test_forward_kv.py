"""The parts behind a Forwarder's knowledge of KV blocks."""

from typing import Any

import msgspec
import pytest

from dynamo_lite.forward.known_blocks import KnownBlocks, PromptTokens
from dynamo_lite.forward.kv_events import Batches
from dynamo_lite.protocol.kv import KvCleared, KvRemoved, KvStored
from dynamo_lite.routing.engine_cache import BlockRemoved, BlockStored, KvBatch
from dynamo_lite.routing.kv_chain import chain_hashes

TOKENS = list(range(100, 112))
CHAIN = chain_hashes(TOKENS, 4)


def stored(first: int, end: int, size: int = 4) -> BlockStored:
    return BlockStored(
        block_hashes=[bytes([n]) for n in range(first, end)],
        parent_block_hash=bytes([first - 1]) if first else None,
        token_ids=TOKENS[size * first : size * end],
        block_size=size,
    )


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode(KvBatch(1.0, list(events)))


def test_batches_in_order_change_what_is_held():
    batches = Batches()
    assert batches.take(0, batch(stored(0, 2))) == [KvStored(hashes=CHAIN[:2])]
    assert batches.take(1, batch(stored(2, 3))) == [KvStored(hashes=CHAIN[2:])]
    assert batches.take(1, batch(stored(2, 3))) is None, "seen before"
    gone = BlockRemoved(block_hashes=[b"\2"])
    assert batches.take(2, batch(gone)) == [KvRemoved(hashes=CHAIN[2:])]
    assert batches.block_size == 4 and batches.next == 3


def test_after_a_gap_only_what_follows_counts():
    batches = Batches()
    batches.take(0, batch(stored(0, 2)))
    assert batches.next == 1
    assert batches.take(2, batch(stored(0, 1))) == [KvCleared(), KvStored(hashes=CHAIN[:1])]


def test_numbers_that_do_not_grow_are_another_processs():
    batches = Batches()
    assert [batches.heard(n) for n in (0, 1, 5, 6)] == [False] * 4
    assert batches.heard(6) and batches.heard(0)


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode([1.0, [{"type": "?"}]])])
def test_a_malformed_batch_leaves_nothing(payload: bytes):
    batches = Batches()
    batches.take(0, batch(stored(0, 2)))
    assert batches.take(1, payload) == [KvCleared()]
    assert batches.dropped == 1
    assert batches.take(2, batch(stored(0, 1))) == [KvStored(hashes=CHAIN[:1])]


def test_blocks_of_another_size_or_store_are_left_out():
    batches = Batches()
    batches.take(0, batch(stored(0, 1)))
    assert batches.take(1, batch(stored(0, 2, size=2))) == []
    elsewhere = msgspec.structs.replace(stored(0, 1), medium="CPU")
    assert batches.take(2, batch(elsewhere)) == []


def test_what_engines_hold_is_matched_by_their_block_sizes():
    known = KnownBlocks()
    prompt = PromptTokens(TOKENS)
    known.changed(7, 4, [KvStored(hashes=CHAIN)])
    assert known.matched(prompt) == {}, "it is not followed"
    for engine in (1, 2, 3):
        known.follow(engine)
    known.changed(1, 4, [KvStored(hashes=CHAIN)])
    known.changed(2, 6, [KvStored(hashes=chain_hashes(TOKENS, 6)[:1])])
    assert known.matched(prompt) == {1: 12, 2: 6, 3: 0}
    assert known.matched(PromptTokens(TOKENS[:9])) == {1: 8, 2: 6, 3: 0}
    assert known.matched(PromptTokens(TOKENS, "salt")) == {1: 0, 2: 0, 3: 0}
    known.changed(1, 4, [KvRemoved(hashes=[CHAIN[2]], cut=[CHAIN[1]])])
    assert known.matched(prompt)[1] == 4
    known.changed(2, 6, [KvCleared()])
    assert known.matched(prompt)[2] == 0
    known.forget(1)
    assert known.matched(prompt) == {2: 0, 3: 0} and known.following == 2


def test_an_engine_with_another_block_size_than_before_holds_nothing():
    known = KnownBlocks()
    known.follow(1)
    known.changed(1, 4, [KvStored(hashes=CHAIN)])
    known.changed(1, 6, [KvStored(hashes=chain_hashes(TOKENS, 6)[:1])])
    assert known.matched(PromptTokens(TOKENS)) == {1: 6}


@pytest.mark.parametrize("ids", [[-1], [1 << 32], ["x"]])
def test_impossible_tokens_are_refused(ids: list[Any]):
    with pytest.raises((OverflowError, TypeError)):
        PromptTokens(ids)
