"""Heads and layers over other ranks: every byte lands where one rank would have put it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_lite.protocol.errors import IncompatiblePeer
from dynamo_lite.protocol.prefill import Part
from dynamo_lite.protocol.records import RankMetadata
from dynamo_lite.transfer.block_map import BlockMap
from dynamo_lite.transfer.layout import block_order, region_of_tensor
from dynamo_lite.transfer.sharding import heads_of, hole, join, parts_of
from tests.shards import BLOCKS, Shape, engine, expected
from tests.twins.mover import MemoryFabric

SIZES = [(tensor, pipeline) for tensor in (1, 2, 4) for pipeline in (1, 2)]


@pytest.mark.parametrize("decode", SIZES, ids=str)
@pytest.mark.parametrize("prefill", SIZES, ids=str)
@settings(max_examples=12)
@given(
    heads=st.sampled_from([1, 2, 4, 8]),
    dtype=st.sampled_from([np.uint8, np.uint16]),
    order=st.permutations(range(BLOCKS)),
    other_order=st.permutations(range(BLOCKS)),
    count=st.integers(1, BLOCKS),
)
def test_every_head_of_every_layer_lands_once(
    prefill, decode, heads, dtype, order, other_order, count
):
    fabric = MemoryFabric()
    source = engine(fabric, "p", Shape(*prefill, dtype=dtype), heads, truth=True)
    target = engine(fabric, "d", Shape(*decode, dtype=dtype), heads, truth=False)
    local_ids, remote_ids = order[:count], other_order[:count]

    lanes = join("d", source.ranks, target.ranks)
    moved = 0
    for (here, there), mine in lanes.items():
        source.movers[here].add_peer(f"d{there}", target.ranks[there].agent)
        blocks = BlockMap([(lane.local, lane.remote) for lane in mine], (0, 0))
        local, remote = blocks.descriptors(local_ids, remote_ids)
        moved += int(local[:, 1].sum())
        assert source.movers[here].write(f"d{there}", local, remote, memory=("DRAM", "DRAM")).done()

    for rank in target.shards:
        for shard in rank:
            wanted = expected(shard, local_ids, remote_ids)
            np.testing.assert_array_equal(shard.blocks, wanted)
    block_bytes = sum(region.block_bytes for rank in target.ranks for region in rank.regions)
    assert moved == count * block_bytes, "something was written twice"
    for there, rank in enumerate(target.ranks):
        mine = [parts_of(found) for (_, to), found in lanes.items() if to == there]
        assert {len(parts) for parts in mine} == {1}, "neighbouring layers are one part"
        assert hole(rank.regions, [part for parts in mine for part in parts]) is None


@pytest.mark.parametrize("size", SIZES[1:], ids=str)
def test_tokens_outermost_in_an_unknown_order_move_only_between_equal_ranks(size):
    """One engine's tensor parallelism is `size`'s, heads can only be cut where they are."""
    fabric = MemoryFabric()
    one = engine(fabric, "p", Shape(heads_first=False, opaque=True), 4, truth=True)
    other = engine(fabric, "d", Shape(*size, heads_first=False, opaque=True), 4, truth=False)
    if size[0] == 1:
        assert len(join("d", one.ranks, other.ranks)) == size[1]
    else:
        with pytest.raises(IncompatiblePeer, match="cannot be cut"):
            join("d", one.ranks, other.ranks)
    assert sorted(join("d", other.ranks, other.ranks)) == [(i, i) for i in range(len(other.ranks))]


def one(heads=range(4), *, layer="0", tokens=8) -> RankMetadata:
    region = region_of_tensor(
        layer,
        address=0,
        shape=(8, len(heads), tokens, 4),
        strides_bytes=(len(heads) * tokens * 8, tokens * 8, 8, 2),
        item_bytes=2,
        num_blocks=8,
        heads_dim=1,
        first_head=heads.start,
    )
    return RankMetadata(agent=b"", memory="DRAM", device=0, regions=(region,))


def test_ranks_that_repeat_a_head_take_turns():
    lanes = join("d", [one(range(1)), one(range(1))], [one(range(1))] * 4)
    assert sorted(lanes) == [(0, 0), (0, 2), (1, 1), (1, 3)]


def test_a_rank_whose_heads_others_bring_writes_nothing():
    lanes = join("d", [one(range(1)), one(range(1))], [one(range(1))])
    assert sorted(lanes) == [(0, 0)]


def test_a_cut_names_the_heads_that_it_carries():
    (lane,) = join("d", [one(range(4))], [one(range(2)), one(range(2, 4))])[0, 1]
    assert heads_of(lane.local) == heads_of(lane.remote) == range(2, 4)
    assert (lane.local.base, lane.remote.base, lane.local.block_bytes) == (128, 0, 128)
    (lane,) = join("d", [one(range(2)), one(range(2, 4))], [one(range(4))])[1, 0]
    assert (lane.local.base, lane.remote.base, lane.offset) == (0, 128, 128)


@pytest.mark.parametrize(
    ("own", "remote", "complaint"),
    [
        (
            [one(range(2))],
            [one(range(4))],
            r"heads 0 to 3 of 64 bytes each.*rank 0: heads 0 to 1 of 64 bytes each",
        ),
        ([one(range(2))], [one(range(2), layer="1")], "KV regions differ"),
        ([one(range(2)), one(range(2), layer="1")], [one(range(2))], "2 here, 1 there"),
        ([one(range(2))], [one(range(2), tokens=16)], "of 128 bytes each"),
        ([one(range(2))], [one(range(1 << 40, (1 << 40) + 2))], "heads 1099511627776"),
        ([one(range(2))], [], "1 here, 0 there"),
    ],
)
def test_what_cannot_be_joined_is_refused_with_both_sides_named(own, remote, complaint):
    with pytest.raises(IncompatiblePeer, match=complaint) as refusal:
        join("d", own, remote)
    assert refusal.value.peer == "d"


def test_blocks_without_heads_are_only_joined_whole():
    ranks: list[RankMetadata] = []
    for size in (8, 16):
        region = region_of_tensor(
            "0", address=0, shape=(8, size), strides_bytes=(size, 1), item_bytes=1, num_blocks=8
        )
        ranks.append(RankMetadata(agent=b"", memory="DRAM", device=0, regions=(region,)))
    assert list(join("d", ranks[:1], ranks[:1])) == [(0, 0)]
    with pytest.raises(IncompatiblePeer, match="8 bytes that cannot be cut"):
        join("d", ranks[:1], ranks[1:])


def test_the_order_inside_a_block_does_not_tell_the_number_of_heads_that_can_be_cut():
    four, two = ((8, 4, 8, 4), (1024, 256, 32, 8)), ((8, 2, 8, 4), (512, 256, 32, 8))
    assert block_order(*four, 8, 1) == block_order(*two, 8, 1) == "heads of [8, 4]/[32, 8]"
    assert block_order(*four, 8) != block_order(*two, 8)
    inside = ((8, 4, 8, 4), (1024, 32, 128, 8)), ((8, 2, 8, 4), (512, 32, 64, 8))
    assert [block_order(*layout, 8, 1) for layout in inside] == [
        "[4 heads, 8, 4]/[32, 128, 8]",
        "[2 heads, 8, 4]/[32, 64, 8]",
    ]
    lone = block_order((8, 1, 8, 4), (256, 4, 32, 8), 8, 1)
    assert lone == "heads of [8, 4]/[32, 8]", "the order of a single head is that of its tokens"


WHOLE = one(range(4)).regions + one(range(4), layer="1").regions


@pytest.mark.parametrize(
    ("parts", "missing"),
    [
        ([Part(0, 2, 0, 256)], None),
        ([Part(0, 2, 128, 128), Part(0, 2, 0, 128)], None),
        ([Part(1, 1, 0, 256), Part(0, 1, 0, 64), Part(0, 1, 64, 192)], None),
        ([], "layer 0"),
        ([Part(0, 1, 0, 256)], "layer 1"),
        ([Part(0, 2, 0, 128)], "layer 0"),
        ([Part(0, 2, 64, 192)], "layer 0"),
        ([Part(0, 2, 0, 256), Part(1, 1, 0, 64)], "layer 1"),
        ([Part(0, 2, 0, 128), Part(0, 2, 64, 192)], "layer 0"),
    ],
)
def test_parts_are_whole_when_each_byte_is_named_once(parts, missing):
    found = hole(WHOLE, parts)
    assert found is None if missing is None else missing in (found or "")


@pytest.mark.parametrize("part", [Part(0, 3, 0, 256), Part(2, 1, 0, 1), Part(0, 1, 200, 57)])
def test_a_part_outside_of_the_blocks_is_no_part(part):
    assert hole(WHOLE, [Part(0, 2, 0, 256), part]) is not None
    assert hole(WHOLE, [part]) is not None
