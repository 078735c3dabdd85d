"""Blocks that a decode engine keeps back from its pool: somebody may still write into them."""

from collections.abc import Iterable

from dynamo_lite.disagg.engine_api import Block, BlockPool
from dynamo_lite.policy.instructions import Hold, Instruction, Release


class HeldBlocks(dict[str, list[Block]]):
    """attempt -> blocks on which we have references of our own."""

    def carry_out(self, pool: BlockPool, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Hold):
                blocks = [pool.blocks[i] for i in instruction.block_ids]
                pool.touch(blocks)
                self[instruction.attempt] = blocks
            elif isinstance(instruction, Release):
                pool.free_blocks(reversed(self.pop(instruction.attempt)))
