"""Engines of several ranks in memory, with KV whose every byte says where it belongs."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dynamo_lite.protocol.records import RankMetadata
from dynamo_lite.transfer.base import Mover
from dynamo_lite.transfer.layout import regions_of_tensor

BLOCK_TOKENS, HEAD_SIZE, LAYERS = 8, 3, 4


@dataclass(frozen=True)
class Shape:
    """How an engine lies over its ranks.

    planes: K and V apart, as (2, blocks, ...). heads_first: heads are outermost in a
    block, else tokens. dtype: raw bits of bf16 or fp8.
    """

    tensor: int = 1
    pipeline: int = 1
    planes: bool = False
    heads_first: bool = True
    dtype: type = np.uint16


def heads_at(rank: int, ranks: int, heads: int) -> range:
    """As vLLM spreads them: split, or repeated where ranks exceed heads."""
    each = max(1, heads // ranks)
    first = rank // max(1, ranks // heads) * each
    return range(first, first + each)


@dataclass
class Shard:
    """One layer on one rank: (blocks, heads, tokens, values), whatever lies in memory."""

    layer: int
    heads: range
    blocks: np.ndarray


class ShardedEngine:
    """Those of an engine's ranks that are in `movers`.

    truth: whether they start with their KV, or with zeros.
    """

    def __init__(
        self, shape: Shape, heads: int, blocks: int, movers: Mapping[int, Mover], *, truth: bool
    ):
        self.shards: list[list[Shard]] = []
        self.ranks: list[RankMetadata] = []
        self.movers = list(movers.values())
        self._keep: list[np.ndarray] = []
        each = LAYERS // shape.pipeline
        for index, mover in movers.items():
            stage, rank = divmod(index, shape.tensor)
            mine = heads_at(rank, shape.tensor, heads)
            layers = range(stage * each, (stage + 1) * each)
            made = [self._layer(layer, mine, shape, blocks, mover) for layer in layers]
            self.shards.append([shard for shard, _ in made])
            regions = tuple(region for _, found in made for region in found)
            self.ranks.append(
                RankMetadata(agent=mover.metadata(), memory="DRAM", device=0, regions=regions)
            )
            if truth:
                for shard in self.shards[-1]:
                    shard.blocks[...] = kv_of(shard)

    def _layer(self, layer: int, heads: range, shape: Shape, blocks: int, mover: Mover):
        values = HEAD_SIZE if shape.planes else 2 * HEAD_SIZE
        inner = (len(heads), BLOCK_TOKENS) if shape.heads_first else (BLOCK_TOKENS, len(heads))
        memory = np.zeros((2, blocks, *inner, values) if shape.planes else (blocks, *inner, values))
        memory = memory.astype(shape.dtype)
        self._keep.append(memory)
        address = memory.__array_interface__["data"][0]
        mover.register([(address, memory.nbytes)], "DRAM", 0)
        logical = memory if shape.heads_first else np.swapaxes(memory, -3, -2)
        regions = regions_of_tensor(
            str(layer),
            address=address,
            shape=logical.shape,
            strides_bytes=logical.strides,
            item_bytes=logical.itemsize,
            num_blocks=blocks,
            heads_dim=len(logical.shape) - 3,
            first_head=heads.start,
        )
        by_block = np.moveaxis(logical, 0, -2) if shape.planes else logical
        return Shard(layer, heads, by_block), regions


def kv_of(shard: Shard) -> np.ndarray:
    """Numbers that name layer, block, head and place; the same on every rank that has the head."""
    grid = list(np.indices(shard.blocks.shape))
    grid[1] += shard.heads.start
    code = np.full(shard.blocks.shape, shard.layer + 1)
    for axis in grid:
        code = code * 31 + axis
    limit = np.iinfo(shard.blocks.dtype).max
    return (code % limit).astype(shard.blocks.dtype) + 1


def expected(shard: Shard, local_ids: list[int], remote_ids: list[int]) -> np.ndarray:
    """What the shard holds when these blocks of KV were copied to those of its zeros."""
    wanted = np.zeros_like(shard.blocks)
    wanted[remote_ids] = kv_of(shard)[local_ids]
    return wanted
