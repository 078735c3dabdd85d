"""Engines of several ranks in memory. Every byte of their KV identifies its place."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dynamo_lite.disagg.prefill.staging import Transposer
from dynamo_lite.protocol.records import RankMetadata
from dynamo_lite.transfer.base import Mover
from dynamo_lite.transfer.layout import plain_array, region_of_tensor
from tests.twins.mover import MemoryFabric, MemoryMover

BLOCKS, BLOCK_TOKENS, HEAD_SIZE, LAYERS = 6, 8, 3, 4


@dataclass(frozen=True)
class Shape:
    """How an engine lies over its ranks.

    heads_first: heads are outermost in a block, else tokens. dtype: raw bits of bf16 or fp8.
    tokens: per block. opaque: whether the metadata leaves out where the bytes of each token are.
    """

    tensor: int = 1
    pipeline: int = 1
    heads_first: bool = True
    dtype: type = np.uint16
    tokens: int = BLOCK_TOKENS
    opaque: bool = False


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
        self._keep: list[list[np.ndarray]] = []
        each = LAYERS // shape.pipeline
        for index, mover in movers.items():
            stage, rank = divmod(index, shape.tensor)
            mine = heads_at(rank, shape.tensor, heads)
            self._keep.append([])
            layers = range(stage * each, (stage + 1) * each)
            made = [self._layer(layer, mine, shape, blocks, mover) for layer in layers]
            self.shards.append([shard for shard, _ in made])
            regions = tuple(region for _, region in made)
            self.ranks.append(
                RankMetadata(agent=mover.metadata(), memory="DRAM", device=0, regions=regions)
            )
            if truth:
                for shard in self.shards[-1]:
                    shard.blocks[...] = kv_of(shard)

    def _layer(self, layer: int, heads: range, shape: Shape, blocks: int, mover: Mover):
        tokens = shape.tokens
        inner = (len(heads), tokens) if shape.heads_first else (tokens, len(heads))
        memory = np.zeros((blocks, *inner, 2 * HEAD_SIZE), shape.dtype)
        self._keep[-1].append(memory)
        address = memory.__array_interface__["data"][0]
        mover.register([(address, memory.nbytes)], "DRAM", 0)
        logical = memory if shape.heads_first else np.swapaxes(memory, 1, 2)
        array = plain_array(logical.shape, logical.strides, logical.itemsize)
        assert array is not None
        region = region_of_tensor(
            str(layer),
            address=address,
            shape=logical.shape,
            strides_bytes=logical.strides,
            item_bytes=logical.itemsize,
            num_blocks=blocks,
            heads_dim=1,
            first_head=heads.start,
            tokens=tokens,
            arrays=() if shape.opaque else (array,),
        )
        return Shard(layer, heads, logical), region

    def transposer(self, index: int) -> Callable[[int], Transposer]:
        """Opens the staging memory of one of these ranks."""

        def opened(num_bytes: int) -> Transposer:
            # Torch takes long to import, and most engines stage nothing.
            import torch

            from dynamo_lite.vllm.engine.transposer import TorchTransposer

            flat = [torch.from_numpy(a.reshape(-1).view(np.uint8)) for a in self._keep[index]]
            return TorchTransposer([tensor.untyped_storage() for tensor in flat], num_bytes)

        return opened


def engine(
    fabric: MemoryFabric,
    name: str,
    shape: Shape,
    heads: int = 4,
    blocks: int = BLOCKS,
    *,
    truth: bool,
) -> ShardedEngine:
    """All ranks of an engine, over the mover's twin."""
    ranks = range(shape.tensor * shape.pipeline)
    movers = {rank: MemoryMover(fabric, f"{name}{rank}") for rank in ranks}
    return ShardedEngine(shape, heads, blocks, movers, truth=truth)


def kv_of(shard: Shard) -> np.ndarray:
    """Numbers that name layer, token, head and place; the same on every rank that has the head.

    Token t of block b is the pool's token b * (tokens per block) + t.
    """
    blocks, _, tokens = shard.blocks.shape[:3]
    return _by_block(_kv(shard, np.arange(blocks * tokens)), tokens)


def expected(shard: Shard, local_ids: list[int], remote_ids: list[int]) -> np.ndarray:
    """What the shard holds when these blocks of KV were copied to those of its zeros."""
    wanted = np.zeros_like(shard.blocks)
    wanted[remote_ids] = kv_of(shard)[local_ids]
    return wanted


def expected_of_tokens(
    shard: Shard, tokens: Sequence[int], remote_ids: Sequence[int]
) -> np.ndarray:
    """The same of tokens of a pool with blocks of another size; zeros behind the last one."""
    wanted = np.zeros_like(shard.blocks)
    size = shard.blocks.shape[2]
    kv = _kv(shard, np.asarray(tokens))
    kv = np.concatenate([kv, np.zeros((len(remote_ids) * size - len(kv), *kv.shape[1:]), kv.dtype)])
    wanted[list(remote_ids)] = _by_block(kv, size)
    return wanted


def _kv(shard: Shard, tokens: np.ndarray) -> np.ndarray:
    """[tokens, heads, values] of these tokens of the pool."""
    heads, values = shard.blocks.shape[1], shard.blocks.shape[3]
    head = shard.heads.start + np.arange(heads)[:, None]
    code = ((shard.layer + 1) * 31 + tokens[:, None, None]) * 31 + head
    code = code * 31 + np.arange(values)
    limit = np.iinfo(shard.blocks.dtype).max
    return (code % limit).astype(shard.blocks.dtype) + 1


def _by_block(kv: np.ndarray, tokens: int) -> np.ndarray:
    """[tokens, heads, values] as [blocks, heads, tokens of a block, values]."""
    return kv.reshape(-1, tokens, *kv.shape[1:]).swapaxes(1, 2)
