"""Block ids to memory: runs, strides and devices of the copies that are planned."""

import itertools
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_lite.protocol.records import KvRegion
from dynamo_lite.transfer.block_map import BlockMap
from dynamo_lite.transfer.layout import region_of_tensor

HEADS, SIZE, HEAD = 2, 4, 3


def together(blocks, *, pad=0):
    """(blocks, heads, size, 2 * head): vLLM's CPU layout, K and V side by side."""
    flat = np.zeros((blocks, HEADS * SIZE * 2 * HEAD + pad), np.uint16)
    return flat[:, : flat.shape[1] - pad].reshape(blocks, HEADS, SIZE, 2 * HEAD)


def padded(blocks):
    return together(blocks, pad=5)


def region_of(tensor, blocks, layer="0", **overrides):
    described = {
        "address": tensor.__array_interface__["data"][0],
        "shape": tensor.shape,
        "strides_bytes": tensor.strides,
        "item_bytes": tensor.itemsize,
        "num_blocks": blocks,
    }
    return region_of_tensor(layer, **{**described, **overrides})


@st.composite
def block_pairs(draw):
    """As many distinct blocks here as there; long runs are likely."""
    sizes = [draw(st.integers(3, 24)) for _ in range(2)]
    count = draw(st.integers(1, min(sizes)))

    def ids(size):
        if draw(st.booleans()):
            start = draw(st.integers(0, size - count))
            return list(range(start, start + count))
        return draw(st.permutations(range(size)))[:count]

    return [ids(size) for size in sizes]


@given(pairs=block_pairs())
def test_runs_are_as_long_as_they_can_be(pairs):
    local_ids, remote_ids = pairs
    runs = runs_of(local_ids, remote_ids)
    spelled_out = [(a + i, b + i) for a, b, count in runs for i in range(count)]
    assert spelled_out == sorted(zip(local_ids, remote_ids, strict=True))
    for (a, b, count), (c, d, _) in itertools.pairwise(runs):
        assert (a + count, b + count) != (c, d)


def runs_of(local_ids, remote_ids):
    """(first local block, first remote one, how many), of blocks of one byte."""
    bytewise = KvRegion(layer="0", base=0, stride_bytes=1, block_bytes=1)
    local, remote = BlockMap([(bytewise, bytewise)], (0, 0)).descriptors(local_ids, remote_ids)
    return [(a, b, n) for (a, n, _), (b, _, _) in zip(local.tolist(), remote.tolist(), strict=True)]


def test_every_block_needs_a_partner():
    with pytest.raises(ValueError, match="2 local blocks for 1"):
        runs_of([1, 2], [1])


def side_by_side(base, stride, layers=3):
    """Layers whose parts of a block lie together, as where the block dimension is outermost."""
    return [
        KvRegion(layer=str(i), base=base + 64 * i, stride_bytes=stride, block_bytes=64)
        for i in range(layers)
    ]


@pytest.mark.parametrize(
    ("strides", "expected"),
    [
        pytest.param((192, 192), [(1192, 5192, 384)], id="dense on both sides"),
        pytest.param(
            (192, 256), [(1192, 5256, 192), (1384, 5512, 192)], id="a gap behind each block there"
        ),
        pytest.param(
            (64, 64),
            [(1064, 5064, 128), (1128, 5128, 128), (1192, 5192, 128)],
            id="no room for all: they are pools of their own",
        ),
    ],
)
def test_layers_whose_blocks_lie_together_are_joined(strides, expected):
    here, there = (side_by_side(base, s) for base, s in zip((1000, 5000), strides, strict=True))
    pairs = list(zip(here, there, strict=True))
    local, remote = BlockMap(pairs, (0, 0)).descriptors([1, 2], [1, 2])
    assert list(zip(*local[:, :2].T.tolist(), strict=True)) == [(a, n) for a, _, n in expected]
    assert list(zip(*remote[:, :2].T.tolist(), strict=True)) == [(b, n) for _, b, n in expected]


def test_descriptors_carry_each_side_s_device():
    region = KvRegion(layer="0", base=0, stride_bytes=64, block_bytes=64)
    local, remote = BlockMap([(region, region)], (0, 3)).descriptors([1], [2])
    assert (local.dtype, remote.dtype) == (np.uint64, np.uint64)
    assert set(local[:, 2].tolist()) == {0} and set(remote[:, 2].tolist()) == {3}


def test_addresses_in_the_upper_half_are_kept():
    high = KvRegion(layer="0", base=(1 << 63) + 64, stride_bytes=64, block_bytes=64)
    local, _ = BlockMap([(high, high)], (0, 0)).descriptors([1], [1])
    assert local[0].tolist() == [(1 << 63) + 128, 64, 0]


def test_a_region_by_example():
    block = HEADS * SIZE * 2 * HEAD * 2
    region = KvRegion(layer="0", base=1000, stride_bytes=block, block_bytes=block)
    assert region_of(together(8), 8, address=1000) == region
    assert region_of(padded(8), 8, address=1000).stride_bytes == block + 10


def test_a_dimension_of_one_may_have_any_stride():
    tensor = np.zeros((8, 1, SIZE, HEAD), np.uint16)
    strides = (tensor.strides[0], 77, *tensor.strides[2:])
    region = region_of(tensor, 8, strides_bytes=strides)
    assert region.block_bytes == prod((SIZE, HEAD)) * 2


@pytest.mark.parametrize(
    ("shape", "strides", "complaint"),
    [
        ((4, 4, 8), (64, 16, 2), "its first dimension is not 8 blocks"),
        ((2, 8, 4, 4), (256, 32, 8, 2), "first dimension"),  # K and V apart
        ((), (), "first dimension"),
        ((8, 4, 4), (64, 16, 2), "not dense"),  # rows padded inside a block
        ((8, 4, 4), (32, 8, 4), "not dense"),  # every other element
        ((8, 4, 4), (32, 0, 2), "not dense"),  # broadcast
        ((8, 4, 4), (32, -8, 2), "not dense"),
        ((8, 4, 4), (2, 64, 16), "not dense"),  # blocks innermost
        ((8, 4, 4), (16, 8, 2), "overlap"),
        ((8, 4, 4), (-32, 8, 2), "overlap"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(shape, strides, complaint):
    with pytest.raises(ValueError, match=complaint) as refusal:
        region_of_tensor(
            "l7", address=0, shape=shape, strides_bytes=strides, item_bytes=2, num_blocks=8
        )
    assert str(shape) in str(refusal.value)
