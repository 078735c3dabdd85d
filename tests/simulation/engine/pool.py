"""KV blocks with reference counts, a free queue and a prefix cache, as vLLM's pool has them."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class PoolError(AssertionError):
    """A block was freed too often, or used while it was free."""


@dataclass(eq=False, slots=True)
class Block:
    """key: under which the prefix cache finds it; None when it holds no full prefix."""

    block_id: int
    ref_cnt: int = 0
    key: int | None = None

    @property
    def is_null(self) -> bool:
        return self.block_id == 0


class BlockPool:
    """Block 0 stands for nothing and is never given out.

    A block without references is free; it keeps its content, and may be found by
    its key, until it is given out again: oldest first.
    """

    def __init__(self, num_blocks: int):
        self.num_gpu_blocks = num_blocks
        self.blocks = [Block(i) for i in range(num_blocks)]
        self._free: OrderedDict[int, Block] = OrderedDict((b.block_id, b) for b in self.blocks[1:])
        self._cached: dict[int, Block] = {}

    def __repr__(self) -> str:
        return f"<BlockPool free={len(self._free)} of {self.num_gpu_blocks - 1}>"

    def get_num_free_blocks(self) -> int:
        return len(self._free)

    def taken(self) -> list[int]:
        """Ids of the blocks with references."""
        return [b.block_id for b in self.blocks if b.ref_cnt]

    def cached(self) -> list[tuple[int, int]]:
        """(block id, key) of what the prefix cache can find."""
        return [(block.block_id, key) for key, block in self._cached.items()]

    def forget(self) -> None:
        """Empties the prefix cache, as a restart would."""
        for block in self._cached.values():
            block.key = None
        self._cached.clear()

    def find(self, keys: Iterable[int]) -> list[Block]:
        """The cached blocks of the longest known prefix."""
        found: list[Block] = []
        for key in keys:
            block = self._cached.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def touch(self, blocks: Sequence[Block]) -> None:
        """Takes one reference on each."""
        for block in blocks:
            if block.ref_cnt == 0:
                self._free.pop(block.block_id)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """Gives one reference back on each; the first one freed is the first reused."""
        for block in ordered_blocks:
            if block.ref_cnt <= 0:
                raise PoolError(f"block {block.block_id} is freed, and is free already")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self._free[block.block_id] = block

    def allocate(self, count: int) -> list[Block] | None:
        """`count` blocks with one reference each, or None when fewer are free."""
        if count > len(self._free):
            return None
        taken: list[Block] = []
        for _ in range(count):
            _, block = self._free.popitem(last=False)
            block.ref_cnt = 1
            if block.key is not None:
                if self._cached.get(block.key) is block:
                    del self._cached[block.key]
                block.key = None
            taken.append(block)
        return taken

    def cache(self, block: Block, key: int) -> None:
        """The block will hold the full prefix that `key` names."""
        if block.key is None:
            block.key = key
            self._cached.setdefault(key, block)
