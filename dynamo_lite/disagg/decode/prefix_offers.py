"""Which blocks of a prompt a decode engine awaits, and which it offers to be read.

Where all layers look back no farther than a window, the engine keeps no blocks for
what lies before: a null block stands for each. Nothing is written there.

An engine's prefix cache knows blocks from the moment when their computation is
scheduled, and a prompt may hit them in that very step. Whoever computes beside it
may rely on them; a reader from outside may come before the step has ended. So only
blocks that no step under way fills are offered.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from msgspec import structs

from dynamo_lite.disagg.engine_api import BlockPool
from dynamo_lite.protocol.prefill import RemotePrefillRequest


def first_awaited(pool: BlockPool, block_ids: Sequence[int], computed: int) -> int:
    """The number of the first block that must be written, where `computed` are there."""
    return next(
        number
        for number in range(computed, len(block_ids))
        if not pool.blocks[block_ids[number]].is_null
    )


class PrefixOffers:
    """The jobs of the step that is being scheduled, and which prefixes they may offer.

    overlapping_steps: how many steps may be under way when one is scheduled, with it.
    """

    def __init__(self, overlapping_steps: int):
        self._jobs: list[RemotePrefillRequest] = []
        self._filling: deque[frozenset[int]] = deque(maxlen=overlapping_steps)

    def step(self, filling: Iterable[int]) -> None:
        """The step that is being scheduled completes these blocks."""
        self._filling.append(frozenset(filling))

    def add(self, job: RemotePrefillRequest) -> None:
        """The step that is being scheduled asks for this remote prefill."""
        self._jobs.append(job)

    def take(self, pool: BlockPool) -> list[RemotePrefillRequest]:
        """The jobs of the step. Call `step` first: it tells what the step computes."""
        jobs, self._jobs = self._jobs, []
        return [self._vouched(pool, job) for job in jobs]

    def _vouched(self, pool: BlockPool, job: RemotePrefillRequest) -> RemotePrefillRequest:
        """The job; without its prefix unless all of that holds its KV, and goes on doing so."""
        for block in job.prefix_block_ids:
            if pool.blocks[block].is_null or any(block in step for step in self._filling):
                return structs.replace(job, prefix_block_ids=[])
        return job
