"""The order in which vLLM's block pool hands out free blocks: in runs.

By itself the pool hands out the block that was freed first, one after the other. Requests of
different lengths soon leave no neighbours in that order, and each block of a transfer then
needs descriptors of its own. Here the blocks of an allocation follow one another, if there is
such a run among the blocks that were not used lately.
"""

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

logger = logging.getLogger(__name__)

#: When a block was freed, if it is not free.
_IN_USE = np.iinfo(np.int64).max

#: Up to so many blocks fill gaps.
_GAP_BLOCKS = 16

#: Shares of the free blocks, the ones first that were freed first: gaps are filled there, and
#: runs are taken there.
_GAPS_AMONG, _RUNS_AMONG = 0.25, 0.75

#: Longer runs are not looked for: they would be made of younger blocks, and save little.
_MAX_RUN = 128

#: An allocation is split into runs of a 16th of it at least, and of 4 blocks.
_MAX_SPLIT, _MIN_RUN = 16, 4

#: Single blocks are looked for by so many at a time, or by this share of the pool; so many
#: free ones are looked at to find out which are older.
_SINGLES, _SINGLES_SHARE, _SAMPLE = 64, 1 / 128, 1024

_Numbers = npt.NDArray[np.int64]


def hand_out_runs(pool: BlockPool) -> None:
    """Replaces the queue of a pool of which nothing was handed out yet."""
    if type(pool.free_block_queue) is not FreeKVCacheBlockQueue:
        logger.warning(
            "the block pool's queue is a %s, not vLLM's: blocks are not handed out in runs",
            type(pool.free_block_queue).__name__,
        )
        return
    pool.free_block_queue = FreeRuns(pool.free_block_queue.get_all_free_blocks(), len(pool.blocks))


class FreeRuns(FreeKVCacheBlockQueue):
    """vLLM's queue of free blocks, from which several blocks are taken as runs.

    Large allocations take the run that has been free the longest, by its youngest block;
    small ones and single blocks fill the shortest gaps, so that they do not cut long runs
    into pieces. Neither touches blocks that were freed lately, which is what the prefix cache
    will be asked for, unless nothing else is left: an allocation is rather split.
    num_blocks: of the pool, also those that are not free.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock], num_blocks: int):
        super().__init__(list(blocks))
        self._blocks = {block.block_id: block for block in blocks}
        self._freed_at: _Numbers = np.full(num_blocks, _IN_USE)
        self._first = self._next = 0
        self._note(blocks)
        self._at_a_time = max(_SINGLES, int(num_blocks * _SINGLES_SHARE))
        #: The next single blocks, last one first, and when they were freed.
        self._singles: list[tuple[int, int]] = []

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """In ascending order of their ids. Raises ValueError if there are not so many."""
        if n > self.num_free_blocks:
            raise ValueError(f"{n} blocks are wanted, {self.num_free_blocks} are free")
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
        """The first of so many free blocks in a row, of which none is young."""
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
        """The first of so many old blocks in a row, where as few free ones as possible lie
        around them."""
        starts, ends = self._stretches()
        old = self._freed_at <= self._limit(_GAPS_AMONG, length)
        below = np.concatenate(([0], np.cumsum(old)))
        found = np.flatnonzero(below[length:] - below[:-length] == length)
        if not len(found):
            return None
        stretch = np.searchsorted(starts, found, side="right") - 1
        lengths = (ends - starts)[stretch]
        found = found[lengths == lengths.min()]
        # Freed together they are oldest at one end.
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
            # From the older end on.
            ids += old if freed_at[0] < freed_at[-1] else reversed(old)
            if len(ids) >= self._at_a_time:
                break
        self._singles = [(i, int(self._freed_at[i])) for i in reversed(ids[: self._at_a_time])]
        return self._singles.pop()[0]

    def _stretches(self) -> tuple[_Numbers, _Numbers]:
        """Free blocks in a row: the first one of each row, and the first one after it."""
        free = (self._freed_at != _IN_USE).view(np.int8)
        edges = np.diff(free, prepend=0, append=0)
        return np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)

    def _limit(self, share: float, least: int) -> int:
        """Until when this share of the free blocks was freed, or at least so many of them."""
        freed_at = self._freed_at[self._freed_at != _IN_USE]
        sample = freed_at[:: max(1, len(freed_at) // _SAMPLE)]
        wanted = max(share, least / len(freed_at)) * len(sample)
        place = min(int(wanted), len(sample) - 1)
        return int(np.partition(sample, place)[place])
