"""Blocks put together in another size and order: every byte against where its token lies."""

import ctypes
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_lite.protocol.codec import encode_json
from dynamo_lite.protocol.errors import IncompatiblePeer, ProtocolError
from dynamo_lite.protocol.kv_regions import decode_engine
from dynamo_lite.protocol.records import EngineMetadata, KvRegion
from dynamo_lite.transfer.sharding import join
from dynamo_lite.transfer.transpose import slot_layout, units_of
from tests.shards import BLOCKS, Shape, ShardedEngine, engine, expected_of_tokens
from tests.twins.mover import MemoryFabric

SIZES = [(32, 64), (64, 32), (16, 48), (48, 32), (6, 4), (8, 8), (5, 7)]


@st.composite
def writes(draw):
    """Shapes of both sides, and some blocks of a prompt."""
    here, there = draw(st.sampled_from(SIZES))
    dtype = draw(st.sampled_from([np.uint8, np.uint16, np.uint32]))
    orders = draw(st.sampled_from([(True, False), (False, True), (True, True), (False, False)]))
    ours, theirs = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2)]))
    if ours > theirs:
        orders = orders[0], True  # its blocks must be cut
    stages = draw(st.sampled_from([(1, 1), (1, 2), (2, 1)]))
    prefill = Shape(ours, stages[0], heads_first=orders[0], dtype=dtype, tokens=here)
    decode = Shape(theirs, stages[1], heads_first=orders[1], dtype=dtype, tokens=there)
    local_ids = draw(st.permutations(range(BLOCKS)))[: draw(st.integers(1, BLOCKS))]
    first = draw(st.integers(0, 3))
    skip = (first * there) % here
    reach = len(local_ids) * here - skip
    most = min(BLOCKS, -(-reach // there))
    count = draw(st.integers(1, max(1, most)))
    remote_ids = draw(st.permutations(range(BLOCKS)))[:count]
    return prefill, decode, local_ids, skip, remote_ids


@settings(max_examples=40)
@given(writes())
def test_every_token_of_every_head_lies_where_the_receiver_has_it(write):
    prefill, decode, local_ids, skip, remote_ids = write
    fabric = MemoryFabric()
    source = engine(fabric, "p", prefill, truth=True)
    target = engine(fabric, "d", decode, truth=False)
    size = prefill.tokens
    tokens = [block * size + token for block in local_ids for token in range(size)][skip:]
    if not tokens or (len(tokens) <= (len(remote_ids) - 1) * decode.tokens):
        return
    lanes = join("d", source.ranks, target.ranks)
    for (here, _), mine in lanes.items():
        staged = [replace(lane, local=whole(source, here, lane), staged=True) for lane in mine]
        layout = slot_layout(staged, BLOCKS * sum(lane.remote.block_bytes for lane in mine))
        assert layout.capacity == BLOCKS
        units = units_of(layout, local_ids, skip, len(remote_ids))
        transposer = source.transposer(here)(sum(r.remote.block_bytes for r in mine) * BLOCKS)
        assert transposer.transpose(layout, units, 0)()
        for region, lane in zip(layout.regions, mine, strict=True):
            for position, block in enumerate(remote_ids):
                at = transposer.address + region.base + position * region.stride_bytes
                to = lane.remote.base + block * lane.remote.stride_bytes
                ctypes.memmove(to, at, region.block_bytes)
    for shard in [shard for rank in target.shards for shard in rank]:
        wanted = expected_of_tokens(shard, tokens[: len(remote_ids) * decode.tokens], remote_ids)
        np.testing.assert_array_equal(shard.blocks, wanted)


def whole(source: ShardedEngine, rank: int, lane) -> KvRegion:
    regions = source.ranks[rank].regions
    return next(region for region in regions if region.layer == lane.local.layer)


@pytest.mark.parametrize(
    ("prefill", "decode", "complaint"),
    [
        (Shape(opaque=True), Shape(tokens=16, opaque=True), "order that is not known"),
        (Shape(), Shape(tokens=16, opaque=True), "order that is not known.*8 tokens"),
        (Shape(), Shape(tokens=16, dtype=np.uint8), "16 tokens.*8 tokens"),
        (Shape(2), Shape(heads_first=False), "cannot be cut, from head 0 on"),
    ],
)
def test_what_cannot_be_laid_out_is_refused_with_both_sides_named(prefill, decode, complaint):
    fabric = MemoryFabric()
    source = engine(fabric, "p", prefill, truth=False)
    target = engine(fabric, "d", decode, truth=False)
    with pytest.raises(IncompatiblePeer, match=complaint):
        join("d", source.ranks, target.ranks)


def test_a_head_slice_of_blocks_with_tokens_outermost_is_staged():
    fabric = MemoryFabric()
    source = engine(fabric, "p", Shape(heads_first=False), truth=False)
    target = engine(fabric, "d", Shape(2, heads_first=False), truth=False)
    lanes = join("d", source.ranks, target.ranks)
    assert sorted(lanes) == [(0, 0), (0, 1)]
    assert all(lane.staged for mine in lanes.values() for lane in mine)


def test_a_block_that_is_larger_than_a_slot_is_refused():
    fabric = MemoryFabric()
    source = engine(fabric, "p", Shape(), truth=False)
    target = engine(fabric, "d", Shape(tokens=16), truth=False)
    lanes = join("d", source.ranks, target.ranks)[0, 0]
    with pytest.raises(ValueError, match=r"a block needs \d+ bytes, a slot has only 100"):
        slot_layout(lanes, 100)


@pytest.mark.parametrize(("local_ids", "skip", "count"), [([1], 0, 3), ([1, 2], 8, 2), ([1], 3, 1)])
def test_blocks_without_tokens_are_no_write(local_ids, skip, count):
    fabric = MemoryFabric()
    source = engine(fabric, "p", Shape(tokens=8), truth=False)
    target = engine(fabric, "d", Shape(tokens=4 if count == 3 else 8), truth=False)
    lanes = [replace(lane, staged=True) for lane in join("d", source.ranks, target.ranks)[0, 0]]
    with pytest.raises(ValueError, match="tokens into the first one"):
        units_of(slot_layout(lanes, 1 << 20), local_ids, skip, count)


@pytest.mark.parametrize(
    "changed",
    [
        {"tokens": 0},
        {"tokens": 16},
        {"tokens": 12, "block_bytes": 4 * 12 * 12},
        {"block_bytes": 4 * 8 * 12 + 1},
        {"offset": 1},
        {"head_stride": 1 << 40},
        {"group_stride": 13},
        {"items": 2, "item_stride": 6},
        {"items": 1 << 40, "item_bytes": 1 << 40},
        {"group_tokens": 3},
    ],
    ids=str,
)
def test_arrays_that_are_not_a_peer_s_blocks_are_no_metadata(changed):
    fabric = MemoryFabric()
    rank = engine(fabric, "d", Shape(), truth=False).ranks[0]

    def said(**changed) -> bytes:
        of_array = {name: value for name, value in changed.items() if hasattr(array, name)}
        of_region = {name: value for name, value in changed.items() if hasattr(region, name)}
        arrays = (msgspec.structs.replace(array, **of_array),)
        spoilt = msgspec.structs.replace(region, arrays=arrays, **of_region)
        ranks = (msgspec.structs.replace(rank, regions=(spoilt, *rank.regions[1:])),)
        metadata = EngineMetadata(
            engine_id="d",
            lease_id=1,
            fingerprint={},
            block_size_tokens=8,
            num_blocks=BLOCKS,
            ranks=ranks,
        )
        return encode_json(metadata)

    region = rank.regions[0]
    [array] = region.arrays
    assert decode_engine(said()).ranks[0].regions == rank.regions
    with pytest.raises(ProtocolError):
        decode_engine(said(**changed))
