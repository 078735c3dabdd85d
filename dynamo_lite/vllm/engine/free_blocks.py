"""Makes vLLM's block pool allocate free blocks in contiguous runs.

By default the pool allocates blocks in the order in which they were freed. Requests of
different lengths soon leave no neighbours in that order, and then each block of a transfer
needs its own descriptors. Here an allocation gets contiguous blocks, if there is such a run
among the blocks that were not used recently.
"""

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

logger = logging.getLogger(__name__)

#: The value of `_freed_at` for a block that is not free.
_IN_USE = np.iinfo(np.int64).max

#: Allocations of up to this many blocks fill gaps.
_GAP_BLOCKS = 16

#: Gaps are filled, and runs taken, among these shares of the free blocks, the longest free first.
_GAPS_AMONG, _RUNS_AMONG = 0.25, 0.75

#: The longest run. Longer ones would need more recently used blocks, and save little.
_MAX_RUN = 128

#: An allocation is split into runs of at least a 16th of it, and at least 4 blocks.
_MAX_SPLIT, _MIN_RUN = 16, 4

#: Single blocks are searched in batches of this number, or this share of the pool. The age limit
#: is estimated from a sample of this many free blocks.
_SINGLES, _SINGLES_SHARE, _SAMPLE = 64, 1 / 128, 1024

_Numbers = npt.NDArray[np.int64]


def hand_out_runs(pool: BlockPool) -> None:
    """Replaces the free queue of a pool. Call it before the first allocation."""
    if type(pool.free_block_queue) is not FreeKVCacheBlockQueue:
        logger.warning(
            "the block pool's queue is a %s, not vLLM's: blocks are not allocated in runs",
            type(pool.free_block_queue).__name__,
        )
        return
    pool.free_block_queue = FreeRuns(pool.free_block_queue.get_all_free_blocks(), len(pool.blocks))


class FreeRuns(FreeKVCacheBlockQueue):
    """vLLM's queue of free blocks, with allocations in runs.

    Large allocations take the run that has been free the longest, judged by its most recently
    freed block. Small ones and single blocks fill the shortest gaps, so that they do not split
    long runs. Recently freed blocks, which the prefix cache will likely need, are only taken
    if nothing else is left: an allocation is split first.
    num_blocks: all blocks of the pool, free or not.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock], num_blocks: int):
        super().__init__(list(blocks))
        self._blocks = {block.block_id: block for block in blocks}
        self._freed_at: _Numbers = np.full(num_blocks, _IN_USE)
        self._first = self._next = 0
        self._note(blocks)
        self._at_a_time = max(_SINGLES, int(num_blocks * _SINGLES_SHARE))
        #: The next single blocks, last one first, with the value of `_freed_at`.
        self._singles: list[tuple[int, int]] = []

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Returns blocks in ascending order of their ids. Raises ValueError if too few are free."""
        if n > self.num_free_blocks:
            raise ValueError(f"cannot allocate {n} blocks: only {self.num_free_blocks} are free")
        taken: list[KVCacheBlock] = []
        length = min(n, _MAX_RUN)
        shortest = max(min(_MIN_RUN, n), length // _MAX_SPLIT, 2)
        while length >= shortest:
            start = self._gap(length) if length <= _GAP_BLOCKS else self._oldest_run(length)
            if start is None:
                length //= 2
                continue
            taken += self._take(range(start, start + length))
            length = min(length, n - len(taken))
        while len(taken) < n:
            taken += self._take([self._single()])
        return sorted(taken, key=lambda block: block.block_id)

    def remove(self, block: KVCacheBlock) -> None:
        super().remove(block)
        self._freed_at[block.block_id] = _IN_USE

    def append(self, block: KVCacheBlock) -> None:
        super().append(block)
        self._note([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        super().append_n(blocks)
        self._note(blocks)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        super().prepend_n(blocks)
        self._first -= len(blocks)
        ids = [block.block_id for block in blocks]
        self._freed_at[ids] = range(self._first, self._first + len(blocks))

    def _note(self, blocks: Sequence[KVCacheBlock]) -> None:
        ids = [block.block_id for block in blocks]
        self._freed_at[ids] = range(self._next, self._next + len(blocks))
        self._next += len(blocks)

    def _take(self, ids: Sequence[int]) -> list[KVCacheBlock]:
        blocks = [self._blocks[i] for i in ids]
        for block in blocks:
            self.remove(block)
        return blocks

    def _oldest_run(self, length: int) -> int | None:
        """The start of the run of `length` blocks that is free the longest; None if too recent."""
        youngest = self._freed_at
        if length > len(youngest):
            return None
        reach = 1
        while reach < length:
            step = min(reach, length - reach)
            youngest = np.maximum(youngest[:-step], youngest[step:])
            reach += step
        start = int(youngest.argmin())
        return start if youngest[start] <= self._limit(_RUNS_AMONG, length) else None

    def _gap(self, length: int) -> int | None:
        """The first of `length` old blocks in a row, in the shortest stretch of free blocks."""
        starts, ends = self._stretches()
        old = self._freed_at <= self._limit(_GAPS_AMONG, length)
        below = np.concatenate(([0], np.cumsum(old)))
        found = np.flatnonzero(below[length:] - below[:-length] == length)
        if not len(found):
            return None
        stretch = np.searchsorted(starts, found, side="right") - 1
        lengths = (ends - starts)[stretch]
        found = found[lengths == lengths.min()]
        # Blocks that were freed together are oldest at one end.
        youngest = np.maximum(self._freed_at[found], self._freed_at[found + length - 1])
        return int(found[youngest.argmin()])

    def _single(self) -> int:
        while self._singles:
            block_id, freed_at = self._singles.pop()
            if self._freed_at[block_id] == freed_at:
                return block_id
        starts, ends = self._stretches()
        limit, ids = self._limit(_GAPS_AMONG, 1), list[int]()
        for i in np.argsort(ends - starts, kind="stable"):
            freed_at = self._freed_at[starts[i] : ends[i]]
            old = (starts[i] + np.flatnonzero(freed_at <= limit)).tolist()
            # Beginning at the older end.
            ids += old if freed_at[0] < freed_at[-1] else reversed(old)
            if len(ids) >= self._at_a_time:
                break
        self._singles = [(i, int(self._freed_at[i])) for i in reversed(ids[: self._at_a_time])]
        return self._singles.pop()[0]

    def _stretches(self) -> tuple[_Numbers, _Numbers]:
        """The stretches of free blocks: the first block of each, and the first one after it."""
        free = (self._freed_at != _IN_USE).view(np.int8)
        edges = np.diff(free, prepend=0, append=0)
        return np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)

    def _limit(self, share: float, least: int) -> int:
        """The `_freed_at` below which this share of the free blocks is, or at least `least`."""
        freed_at = self._freed_at[self._freed_at != _IN_USE]
        sample = freed_at[:: max(1, len(freed_at) // _SAMPLE)]
        wanted = max(share, least / len(freed_at)) * len(sample)
        place = min(int(wanted), len(sample) - 1)
        return int(np.partition(sample, place)[place])
