"""Which blocks of a prompt a decode engine awaits, and which it offers to be read.

If all layers attend to a sliding window only, the engine keeps no blocks for the tokens
before the window: null blocks stand for them. Nothing is written there.

An engine's prefix cache contains blocks from the moment when their computation is
scheduled, and a prompt may hit them in the same step. The engine itself may rely on them.
A prefill worker may read them before the step has ended. So only blocks that no step in
flight fills are offered.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from msgspec import structs

from dynamo_lite.disagg.engine_api import BlockPool
from dynamo_lite.protocol.prefill import RemotePrefillRequest


def first_awaited(pool: BlockPool, block_ids: Sequence[int], computed: int) -> int:
    """The number of the first block that must be written, after `computed` cached ones."""
    return next(
        number
        for number in range(computed, len(block_ids))
        if not pool.blocks[block_ids[number]].is_null
    )


class PrefixOffers:
    """The jobs of the step that is being scheduled, and which prefixes they may offer.

    overlapping_steps: how many steps may be in flight, including the one being scheduled.
    """

    def __init__(self, pool: BlockPool, overlapping_steps: int):
        self._pool = pool
        self._jobs: list[RemotePrefillRequest] = []
        self._filling: deque[frozenset[int]] = deque(maxlen=overlapping_steps)

    def step(self, filling: Iterable[int]) -> None:
        """The step that is being scheduled completes these blocks."""
        self._filling.append(frozenset(filling))

    def add(self, job: RemotePrefillRequest) -> None:
        """Adds a job to the step that is being scheduled."""
        self._jobs.append(job)

    def take(self) -> list[RemotePrefillRequest]:
        """Returns the jobs of the step, and forgets them. Call `step` before."""
        jobs, self._jobs = self._jobs, []
        return [self._vouched(job) for job in jobs]

    def _vouched(self, job: RemotePrefillRequest) -> RemotePrefillRequest:
        """Removes the prefix from the job unless every prefix block is complete and stays so."""
        for block in job.prefix_block_ids:
            if self._pool.blocks[block].is_null or any(block in step for step in self._filling):
                return structs.replace(job, prefix_block_ids=[])
        return job
