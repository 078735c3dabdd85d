"""Heads and layers over other ranks: every byte lands where one rank would have put it."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_lite.protocol.errors import IncompatiblePeer
from dynamo_lite.protocol.records import RankMetadata
from dynamo_lite.transfer.layout import block_order, plan_lanes, regions_of_tensor
from dynamo_lite.transfer.memory import MemoryFabric, MemoryMover
from dynamo_lite.transfer.sharding import heads_of, join, writers

BLOCK, HEAD = 8, 3


@dataclass(frozen=True)
class Shape:
    """An engine's ranks. planes: K and V apart. dtype: bf16 or fp8, as raw bits."""

    tensor_parallel: int
    pipeline_parallel: int
    planes: bool
    dtype: type


def heads_at(rank: int, ranks: int, heads: int) -> range:
    """As vLLM spreads them: split, or repeated where ranks exceed heads."""
    if ranks <= heads:
        each = heads // ranks
        return range(rank * each, (rank + 1) * each)
    head = rank // (ranks // heads)
    return range(head, head + 1)


class Engine:
    """truth: the KV of all layers, blocks, heads."""

    def __init__(self, fabric, name, shape: Shape, heads: int, layers: int, blocks: int, fill):
        self.ranks: list[RankMetadata] = []
        self.movers: list[MemoryMover] = []
        self.parts: list[tuple[int, range, np.ndarray]] = []
        width = HEAD if shape.planes else 2 * HEAD
        each = layers // shape.pipeline_parallel
        for stage in range(shape.pipeline_parallel):
            for rank in range(shape.tensor_parallel):
                mine = heads_at(rank, shape.tensor_parallel, heads)
                mover = MemoryMover(fabric, f"{name}-{stage}-{rank}")
                found = []
                for layer in range(stage * each, (stage + 1) * each):
                    size = (blocks, len(mine), BLOCK, width)
                    tensor = np.zeros((2, *size) if shape.planes else size, shape.dtype)
                    self.parts.append((layer, mine, tensor))
                    tensor[...] = fill(layer, mine, tensor.shape, shape.dtype)
                    address = tensor.__array_interface__["data"][0]
                    mover.register([(address, tensor.nbytes)], "DRAM", 0)
                    found += regions_of_tensor(
                        str(layer),
                        address=address,
                        shape=tensor.shape,
                        strides_bytes=tensor.strides,
                        item_bytes=tensor.itemsize,
                        num_blocks=blocks,
                        heads=len(mine),
                        first_head=mine.start,
                    )
                self.movers.append(mover)
                self.ranks.append(
                    RankMetadata(
                        agent=mover.metadata(), memory="DRAM", device=0, regions=tuple(found)
                    )
                )


def pattern(layer, mine, shape, dtype):
    """Bits that name layer, block, head and place; the same on every rank that has the head."""
    head_dim = len(shape) - 3
    grid = np.indices(shape)
    grid[head_dim] += mine.start
    code = np.full(shape, layer + 1)
    for axis in grid:
        code = code * 31 + axis
    return (code % np.iinfo(dtype).max).astype(dtype) + 1


def nothing(layer, mine, shape, dtype):
    return np.zeros(shape, dtype)


SIZES = st.sampled_from([1, 2, 4])
SHAPES = st.tuples(SIZES, st.sampled_from([1, 2]))


@settings(max_examples=120, deadline=None)
@given(
    prefill=SHAPES,
    decode=SHAPES,
    heads=st.sampled_from([1, 2, 4]),
    planes=st.booleans(),
    dtype=st.sampled_from([np.uint8, np.uint16]),
    data=st.data(),
)
def test_every_head_of_every_layer_lands_once(prefill, decode, heads, planes, dtype, data):
    fabric, blocks = MemoryFabric(), 6
    source = Engine(fabric, "p", Shape(*prefill, planes, dtype), heads, 4, blocks, pattern)
    target = Engine(fabric, "d", Shape(*decode, planes, dtype), heads, 4, blocks, nothing)
    count = data.draw(st.integers(1, blocks))
    local_ids = data.draw(st.permutations(range(blocks)))[:count]
    remote_ids = data.draw(st.permutations(range(blocks)))[:count]

    lanes = join("d", source.ranks, target.ranks)
    moved = 0
    for (here, there), mine in lanes.items():
        source.movers[here].add_peer(f"d{there}", target.ranks[there].agent)
        local, remote = plan_lanes(mine, local_ids, remote_ids, devices=(0, 0))
        moved += int(local[:, 1].sum())
        assert source.movers[here].write(f"d{there}", local, remote, memory=("DRAM", "DRAM")).done()

    wanted_bytes = 0
    for layer, mine, tensor in target.parts:
        truth = pattern(layer, mine, tensor.shape, tensor.dtype.type)
        by_block, truth = (np.moveaxis(t, len(t.shape) - 4, 0) for t in (tensor, truth))
        for block in range(blocks):
            if block in remote_ids:
                expected = truth[local_ids[list(remote_ids).index(block)]]
                wanted_bytes += expected.nbytes
            else:
                expected = np.zeros_like(truth[0])
            np.testing.assert_array_equal(by_block[block], expected)
    assert moved == wanted_bytes, "something was written twice"
    for there in range(len(target.ranks)):
        assert 1 <= writers(lanes, there) <= len(source.ranks)


def one(heads=range(4), *, layer="0", head_bytes=64, planes=1) -> RankMetadata:
    region = regions_of_tensor(
        layer,
        address=0,
        shape=(8, len(heads), 8, 4),
        strides_bytes=(len(heads) * head_bytes, head_bytes, 8, 2),
        item_bytes=2,
        num_blocks=8,
        heads=len(heads),
        first_head=heads.start,
    )
    return RankMetadata(agent=b"", memory="DRAM", device=0, regions=region * planes)


def test_equal_engines_are_joined_rank_by_rank():
    ranks = [one(range(2)), one(range(2, 4))]
    assert sorted(join("d", ranks, ranks)) == [(0, 0), (1, 1)]


def test_ranks_that_repeat_a_head_take_turns():
    lanes = join("d", [one(range(1)), one(range(1))], [one(range(1))] * 4)
    assert sorted(lanes) == [(0, 0), (0, 2), (1, 1), (1, 3)]


def test_a_cut_names_the_heads_that_it_carries():
    (lane,) = join("d", [one(range(4))], [one(range(2)), one(range(2, 4))])[0, 1]
    assert heads_of(lane.local) == heads_of(lane.remote) == range(2, 4)
    assert (lane.local.base, lane.remote.base, lane.local.block_bytes) == (128, 0, 128)


@pytest.mark.parametrize(
    ("own", "remote", "complaint"),
    [
        ([one(range(2))], [one(range(4))], "head 2 of its rank 0"),
        ([one(range(2))], [one(range(2), layer="1")], "KV regions differ"),
        ([one(range(2)), one(range(2), layer="1")], [one(range(2))], "2 here, 1 there"),
    ],
)
def test_what_cannot_be_joined_is_refused(own, remote, complaint):
    with pytest.raises(IncompatiblePeer, match=complaint):
        join("d", own, remote)


def test_blocks_that_cannot_be_cut_are_only_joined_whole():
    plain = [RankMetadata(agent=b"", memory="DRAM", device=0, regions=(r,)) for r in uncut()]
    assert list(join("d", plain[:1], plain[:1])) == [(0, 0)]
    with pytest.raises(IncompatiblePeer, match="not to be had"):
        join("d", plain[:1], plain[1:])


def uncut():
    for size in (8, 16):
        (region,) = regions_of_tensor(
            "0", address=0, shape=(8, size), strides_bytes=(size, 1), item_bytes=1, num_blocks=8
        )
        yield region


def test_the_order_inside_a_block_does_not_tell_the_number_of_heads():
    assert block_order((8, 4, 8, 4), (1024, 256, 32, 8), 8, 4) == block_order(
        (8, 2, 8, 4), (512, 256, 32, 8), 8, 2
    )
    assert block_order((8, 4, 8, 4), (1024, 256, 32, 8), 8) != block_order(
        (8, 2, 8, 4), (512, 256, 32, 8), 8
    )
