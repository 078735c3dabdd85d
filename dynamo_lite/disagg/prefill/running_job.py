"""A job that a prefill engine runs: which of its blocks are written, and which come next."""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynamo_lite.disagg.engine_api import Prompt
from dynamo_lite.disagg.messages import NOT_HELD, BlockWrite, PrefixRead
from dynamo_lite.disagg.transfer_params import PrefillJobParams
from dynamo_lite.protocol.trace import TraceContext, traced

#: Returns the blocks of a request, by request id, in the order of its tokens.
BlockIds = Callable[[str], Sequence[int]]


class JobState(enum.Enum):
    ARRIVED = "arrived"  # before its first step
    READING = "reading"  # its prefix is read from the decode engine
    RUNNING = "running"
    STOPPED = "stopped"  # its request has finished with a read in flight
    ENDING = "ending"  # its request has finished, and its ranks may have writes in flight


@dataclass
class RunningJob:
    """One attempt in this engine; it counts blocks of the decode engine's size."""

    params: PrefillJobParams
    request: Prompt
    #: Tokens per block of this engine.
    block_size: int
    state: JobState = JobState.ARRIVED
    #: Number of the first block that no write covers yet.
    written: int = 0
    #: Monotonic time of the job's first step.
    scheduled: float = 0.0
    trace: TraceContext | None = None
    #: Prompt tokens that were in this engine's prefix cache.
    cached_tokens: int = 0
    #: Whether the ranks know the decode engine.
    announced: bool = False
    #: Whether the last write is scheduled.
    complete: bool = False
    #: Why not all was written; the first reason that a rank has reported.
    failure: str | None = None

    @property
    def attempt(self) -> str:
        return self.params.attempt

    @property
    def first(self) -> int:
        """Number of the first block to write, in the decode engine's blocks."""
        return self.params.num_computed_tokens // self.params.block_size

    def begin(self, now: float, cached: int) -> None:
        """Its first step. cached: tokens of its prompt in this engine's prefix cache."""
        self.state, self.scheduled, self.cached_tokens = JobState.RUNNING, now, cached
        self.written, self.trace = self.first, traced(self.request.trace_headers)

    @property
    def outcome(self) -> str:
        """Of a job whose writes have ended."""
        if self.failure is not None:
            return "abandoned" if self.failure == NOT_HELD else "failed"
        return "written" if self.complete else "abandoned"

    def preempted(self) -> None:
        """vLLM has preempted it: it is computed and written again from its first block."""
        self.written = self.first

    def read(self, block_ids: Sequence[int], external: int) -> PrefixRead:
        """Begins the read of the prefix's last `external` tokens into `block_ids`, its blocks."""
        prefix = self.params.prefix_block_ids
        start = len(prefix) - external // self.block_size
        self.state = JobState.READING
        return PrefixRead(
            attempt=self.attempt,
            request_id=self.request.request_id,
            target_engine=self.params.engine_id,
            local_ids=list(block_ids[start : len(prefix)]),
            remote_ids=list(prefix[start:]),
            cell=self.params.cell,
        )

    def write(self, done_tokens: int, block_ids: BlockIds, began: float) -> BlockWrite | None:
        """The write of the blocks that this step completes; None if it completes none.

        done_tokens: tokens that are computed after this step. began: when the step began.
        """
        total, size = self.params.num_tokens, self.params.block_size
        remote = self.params.block_ids
        # The last step may compute only the token to sample from. A block is left for its write.
        last = done_tokens >= self.request.num_prompt_tokens
        end = -(-total // size) if last else min(done_tokens, total - 1) // size
        if end <= self.written and not last:
            return None
        own = list(block_ids(self.request.request_id))
        start, skip = divmod(self.written * size, self.block_size)
        behind = -(-min(end * size, total) // self.block_size)
        write = BlockWrite(
            attempt=self.attempt,
            request_id=self.request.request_id,
            target_engine=self.params.engine_id,
            local_ids=own[start:behind],
            remote_ids=remote[self.written - self.first : end - self.first],
            last=last,
            num_blocks=len(remote),
            scheduled=self.scheduled,
            first=self.written - self.first,
            skip_tokens=skip,
            cached_tokens=self.cached_tokens,
            began=began,
            trace=self.trace,
            cell=self.params.cell,
        )
        self.written, self.complete = end, last
        return write
