"""vLLM's batches of KV events, as its publisher encodes them, become chain hashes."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from dynamo_lite.protocol.kv import KvCleared, KvRemoved, KvStored
from dynamo_lite.routing.kv_chain import chain_hashes
from dynamo_lite.vllm.engine.kv_events import VllmKvEvents

BLOCK = 4
TOKENS = list(range(50, 62))
CHAIN = chain_hashes(TOKENS, BLOCK)


CONFIG: Any = SimpleNamespace(
    cache_config=SimpleNamespace(block_size=BLOCK), kv_events_config=SimpleNamespace(endpoint="")
)


class Engine:
    """Batches with vLLM's sequence numbers."""

    def __init__(self) -> None:
        self.drops: list[str] = []
        self.events = VllmKvEvents(CONFIG, self.drops.append)
        self.number = 0

    def __call__(self, *events: Any) -> list[Any]:
        payload = msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=list(events)))
        self.number += 1
        return self.events.take([b"", (self.number - 1).to_bytes(8, "big"), payload])


def stored(first: int, end: int, **fields: Any) -> BlockStored:
    """Blocks of TOKENS; vLLM calls them 100, 101, ..."""
    event = {
        "block_hashes": [100 + i for i in range(first, end)],
        "parent_block_hash": 99 + first if first else None,
        "token_ids": TOKENS[BLOCK * first : BLOCK * end],
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
    }
    return BlockStored(**{**event, **fields})


def removed(*names: int, **fields: Any) -> BlockRemoved:
    return BlockRemoved(block_hashes=list(names), medium="GPU", **fields)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_stored_removed_and_cleared(engine: Engine):
    assert engine(stored(0, 2)) == [KvStored(hashes=CHAIN[:2])]
    assert engine(stored(2, 3)) == [KvStored(hashes=CHAIN[2:])]
    assert sorted(engine.events.held()) == sorted(CHAIN)
    assert engine(removed(102), removed(100)) == [
        KvRemoved(hashes=[CHAIN[2]]),
        KvRemoved(hashes=[CHAIN[0]]),
    ]
    assert engine.events.held() == [CHAIN[1]]
    assert engine(AllBlocksCleared()) == [KvCleared()]
    assert engine.events.held() == []
    assert engine.drops == []


def test_a_block_that_is_held_twice_is_gone_when_both_are(engine: Engine):
    """As vLLM does with prompts that are computed side by side."""
    engine(stored(0, 1), stored(0, 1))
    assert engine(removed(100)) == []
    assert engine(removed(100)) == [KvRemoved(hashes=[CHAIN[0]])]


def test_the_salt_is_part_of_the_hashes(engine: Engine):
    chain = chain_hashes(TOKENS, BLOCK, cache_salt="s")
    assert engine(stored(0, 2, extra_keys=[("s",), None])) == [KvStored(hashes=chain[:2])]
    assert engine(stored(2, 3)) == [KvStored(hashes=chain[2:])]


def test_an_adapters_name_is_part_of_the_hashes(engine: Engine):
    chain = chain_hashes(TOKENS, BLOCK, cache_salt="s", adapter="one")
    keys = [("one", "s"), ("one",)]
    assert engine(stored(0, 2, extra_keys=keys, lora_name="one")) == [KvStored(hashes=chain[:2])]
    last = stored(2, 3, extra_keys=[("one",)], lora_name="one")
    assert engine(last) == [KvStored(hashes=chain[2:])]
    plain = chain_hashes(TOKENS, BLOCK), chain_hashes(TOKENS, BLOCK, cache_salt="one")
    assert not {*chain} & {*plain[0], *plain[1]}


def test_what_depends_on_more_than_that_has_no_name(engine: Engine):
    """Images: the blocks before them have names, they and those behind do not."""
    image = [None, (("image", 3),), None]
    assert engine(stored(0, 3, extra_keys=image)) == [KvStored(hashes=CHAIN[:1])]
    assert engine(stored(2, 3)) == []
    assert engine(removed(102, 101)) == []
    assert engine.drops == []
    assert engine(stored(0, 1, extra_keys=[(("image", 0),)])) == []


def test_the_group_that_keeps_all_blocks_is_followed(engine: Engine):
    """A window's events name the blocks in the window only, after its first tokens none."""
    window_group = {"kind": "sliding_window", "block_size": BLOCK}
    other = {"kind": "full_attention", "block_size": 2 * BLOCK}
    engine.events.follow([window_group, {**other, "block_size": BLOCK}, other])
    window = stored(0, 2, block_hashes=[], extra_keys=[])
    assert engine(window, stored(0, 2, group_idx=1)) == [KvStored(hashes=CHAIN[:2])]
    assert engine(removed(100), removed(101, group_idx=1)) == [KvRemoved(hashes=[CHAIN[1]])]
    engine.events.follow([window_group, other])
    assert engine(window) == []
    assert engine.drops == []


def test_other_groups_sizes_and_unknown_parents_are_left_out(engine: Engine):
    assert engine(stored(0, 1, group_idx=1), removed(100, group_idx=1)) == []
    assert engine(stored(0, 1, block_size=2, token_ids=TOKENS[:2])) == []
    assert engine(stored(1, 2)) == []
    assert engine.events.held() == [] and engine.drops == []


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode([1.0, [["Odd"]]])])
def test_a_malformed_batch_leaves_nothing(payload: bytes, engine: Engine):
    engine(stored(0, 2))
    assert engine.events.take([b"", b"\0" * 8, payload]) == [KvCleared()]
    assert engine.events.held() == []
    assert engine.drops == ["kv_event"]


def test_a_lost_batch_leaves_only_what_comes_after_it(engine: Engine):
    engine(stored(0, 2))
    engine.number += 1
    assert engine(stored(2, 3), stored(0, 1)) == [KvCleared(), KvStored(hashes=CHAIN[:1])]
    assert engine.drops == ["kv_event"]
    assert engine(stored(1, 2)) == [KvStored(hashes=CHAIN[1:2])]


def test_tokens_that_do_not_fit_are_dropped(engine: Engine):
    assert engine(stored(0, 2, token_ids=TOKENS[:3])) == []
    assert engine.drops == ["kv_event"]
