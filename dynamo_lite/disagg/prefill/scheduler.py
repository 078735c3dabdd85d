"""The scheduler half of a prefill engine.

Each remote prefill runs as an ordinary one-token request. A long prefix that only the
decode engine holds is read from there first. Every step names the blocks that it completes,
and the worker halves write them while the next chunk is computed. A request's blocks stay
reserved until no write reads from them. All methods run on the engine's thread, except those of
the session, which run on the bridge's.
"""

import contextlib
import enum
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dynamo_lite.disagg.bridge import OpenBridge
from dynamo_lite.disagg.counters import BROKEN_LINK, ENDED, Counters, note_child
from dynamo_lite.disagg.engine_api import BlockPool, BlockTables, Prompt
from dynamo_lite.disagg.engine_config import EngineConfig, PrefillEngineConfig
from dynamo_lite.disagg.messages import (
    NOT_HELD,
    BlockWrite,
    PrefillStep,
    PrefixRead,
    RankResults,
    WorkerReport,
    WritingAttempt,
)
from dynamo_lite.disagg.metrics import COMPUTED
from dynamo_lite.disagg.server_clients import ServerClients
from dynamo_lite.disagg.transfer_params import PrefillJobParams, unpack
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.health import EngineStatus
from dynamo_lite.protocol.prefill import NULL_BLOCK
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.protocol.trace import traced
from dynamo_lite.runtime.clock import SYSTEM_CLOCK, Clock

#: Returns the blocks of a request, by request id. The second argument: tokens of its prompt.
BlocksOf = Callable[[str, int], BlockTables]


class _State(enum.Enum):
    ARRIVED = "arrived"  # before its first step
    READING = "reading"  # its prefix is read from the decode engine
    RUNNING = "running"
    STOPPED = "stopped"  # its request has finished with a read in flight
    ENDING = "ending"  # its request has finished, and its ranks may have writes in flight


@dataclass
class _Job:
    """One attempt in this engine; it counts blocks of the decode engine's size."""

    params: PrefillJobParams
    request: Prompt
    #: Tokens per block of this engine.
    block_size: int
    #: For the ranks, from its first step on.
    of: WritingAttempt
    state: _State = _State.ARRIVED
    #: Number of the first block that no write covers yet.
    written: int = 0
    #: Whether the ranks have a write of it.
    begun: bool = False
    #: Whether the last write is scheduled.
    complete: bool = False
    #: Why not all was written; the first reason that a rank has reported.
    failure: str | None = None

    @property
    def first(self) -> int:
        """Number of the first block to write, in the decode engine's blocks."""
        return self.params.num_computed_tokens // self.params.block_size

    def begin(self, now: float) -> None:
        """Its first step."""
        self.state, self.written = _State.RUNNING, self.first
        self.of = replace(self.of, scheduled=now)

    @property
    def outcome(self) -> str:
        """Of a job whose writes have ended."""
        if self.failure is not None:
            return "abandoned" if self.failure == NOT_HELD else "failed"
        return "written" if self.complete else "abandoned"

    def read(self, block_ids: Sequence[int], external: int) -> PrefixRead:
        """Begins the read of the prefix's last `external` tokens into `block_ids`, its blocks."""
        prefix = self.params.prefix_block_ids
        start = len(prefix) - external // self.block_size
        self.state = _State.READING
        return PrefixRead(self.of, list(block_ids[start : len(prefix)]), list(prefix[start:]))

    def write(self, done_tokens: int, blocks_of: BlocksOf) -> BlockWrite | None:
        """The write of the blocks that this step completes; None if it completes none.

        done_tokens: tokens that are computed after this step.
        """
        total, size = self.params.num_tokens, self.params.block_size
        # The last step may compute only the token to sample from. A block is left for its write.
        last = done_tokens >= self.request.num_prompt_tokens
        end = -(-total // size) if last else min(done_tokens, total - 1) // size
        if end <= self.written and not last:
            return None
        tables = blocks_of(self.request.request_id, total)
        start, skip = divmod(self.written * size, self.block_size)
        behind = -(-min(end * size, total) // self.block_size)
        first, behind_first = self.written - self.first, end - self.first
        local, others = list(tables[0][start:behind]), list[tuple[list[int], list[int]]]()
        remote = self.params.block_ids[first:behind_first]
        if self.params.other_groups:  # only of engines with blocks of the same size
            wanted = [self.params.block_ids, *self.params.other_groups]
            (local, remote), *others = (
                _needed(table[start:behind], ids[first:behind_first])
                for table, ids in zip(tables, wanted, strict=True)
            )
        self.written, self.complete = end, last
        return BlockWrite(
            self.of,
            local,
            remote,
            last=last,
            first=first,
            skip_tokens=skip,
            other_groups=others,
        )


def _needed(local: Sequence[int], remote: Sequence[int]) -> tuple[list[int], list[int]]:
    """The blocks of one KV group that the decode engine needs, here and there."""
    pairs = [pair for pair in zip(local, remote, strict=True) if pair[1] != NULL_BLOCK]
    return [here for here, _ in pairs], [there for _, there in pairs]


class PrefillScheduler:
    """block_size: tokens per block of this engine. blocks_of: see `BlocksOf`."""

    def __init__(
        self,
        config: EngineConfig,
        block_size: int,
        pool: BlockPool,
        blocks_of: BlocksOf,
        *,
        clients: ServerClients,
        open_bridge: OpenBridge,
        clock: Clock = SYSTEM_CLOCK,
    ):
        assert isinstance(config.role, PrefillEngineConfig)
        self._config, self._role, self._block_size = config, config.role, block_size
        self._pool, self._blocks_of = pool, blocks_of
        self._clients, self._now = clients, clock.monotonic
        self.bridge = open_bridge(self._session)
        self.stats = Counters()
        #: Set before the bridge starts, when all ranks are open.
        self.metadata: EngineMetadata | None = None
        #: The same as bytes, once they were needed.
        self._own = b""
        #: By request id, until nothing of the job is in flight in the ranks.
        self._jobs: dict[str, _Job] = {}
        self._step = PrefillStep()
        self._stepped_at = self._now()

    def may_load(self, request: Prompt) -> bool:
        """Whether another connector may load the prompt's KV: before its first step only. Later
        ones would end beside the job's writes, and the engine would free its blocks twice."""
        job = self._job(request)
        return job is None or job.state is _State.ARRIVED

    def num_new_matched_tokens(
        self, request: Prompt, cached: int, offloaded: int = 0
    ) -> tuple[int, bool]:
        """Returns how many tokens beyond `cached` are read from the decode engine, and whether
        the request has to wait for them.

        A job reads only once: after a failed read or a preemption its prefix is computed.
        offloaded: tokens beyond `cached` that another connector loads if none are read.
        Raises ProtocolError if the job's parameters are malformed.
        """
        job = self._job(request)
        if job is None or job.state is not _State.ARRIVED:
            return 0, False
        # Prefix blocks are only offered if both engines' blocks have the same size.
        held = len(job.params.prefix_block_ids) * self._block_size
        # A read costs a turn of the scheduler and a transfer, so a short prefix is computed.
        if held - cached - offloaded < self._role.min_prefix_read_length:
            return 0, False
        return held - cached, True

    def state_after_alloc(
        self,
        request: Prompt,
        block_ids: Sequence[int],
        external: int,
        queued_at: float | None = None,
    ) -> None:
        """The engine starts a job, or has reserved `block_ids` to read `external` tokens.

        queued_at: monotonic time of the job's arrival in the engine.
        """
        job = self._job(request)
        if job is None or job.state is not _State.ARRIVED:
            return
        now = self._now()
        job.begin(now)
        if queued_at is not None:
            self.stats.add_stage("wait", now - queued_at)
            if job.of.trace is not None:
                note_child(self.stats, "wait", job.of.trace, queued_at, now)
        if external:
            self._introduce(self._step, job)
            self._step.reads.append(job.read(block_ids, external))

    def build_step(self, scheduled: Mapping[str, int], preempted: Iterable[str]) -> PrefillStep:
        """scheduled: request id -> number of its tokens that this step computes."""
        self._stepped_at = self._now()
        step, self._step = self._step, PrefillStep()
        for request_id in preempted:
            if (job := self._jobs.get(request_id)) is not None:
                job.written = job.first  # it is computed and written again from there on
                step.preempted.append(request_id)
        for request_id, tokens in scheduled.items():
            if (job := self._jobs.get(request_id)) is not None and not job.complete:
                self.stats.add(COMPUTED, tokens)
                done = job.request.num_computed_tokens + tokens
                if (write := job.write(done, self._blocks_of)) is not None:
                    if write.first == 0:
                        self._introduce(step, job)
                    job.begun = True
                    step.writes.append(write)
        return step

    def request_finished(self, request: Prompt) -> bool:
        """Returns whether the blocks must stay reserved until the writes have ended."""
        request_id, job = request.request_id, self._job(request)
        if job is None:
            return False
        if job.state is _State.READING:
            # vLLM keeps its blocks until the read has ended; the attempt's end is reported then.
            job.state = _State.STOPPED
            return False
        if not job.begun:
            self._end(request_id, "abandoned")
            return False
        job.state = _State.ENDING
        self._step.ended.append((request_id, job.complete))
        return True

    def worker_output(self, results: RankResults, report: WorkerReport | None) -> None:
        """Handles the reads and writes that have ended in the worker halves, with or without
        success."""
        if report is not None:
            for request_id, why in report.failures.items():
                if (job := self._jobs.get(request_id)) is not None and job.failure is None:
                    job.failure = why
            for engine_id, why in report.broken.items():
                self.stats.append(BROKEN_LINK, [engine_id, why])
        for request_id in sorted(results.received | results.lost):
            self._read_ended(request_id)
        for request_id in sorted(results.sent):
            if (job := self._jobs.get(request_id)) is not None:  # else another connector's
                self._end(request_id, job.outcome, job.failure or "")

    def _read_ended(self, request_id: str) -> None:
        job = self._jobs.get(request_id)
        if job is None:
            return
        if job.state is _State.STOPPED:
            self._end(request_id, "abandoned")
        elif job.state is _State.READING:
            job.state = _State.RUNNING
            if (of := job.of).trace is not None:
                note_child(self.stats, "prefix read", of.trace, of.scheduled, self._now())

    @property
    def busy(self) -> bool:
        """Whether the engine must make steps, even with nothing to compute."""
        over = (_State.ENDING, _State.STOPPED)
        return any(job.state in over for job in self._jobs.values())

    def _job(self, request: Prompt) -> _Job | None:
        """The job of this request, whose parameters are unpacked once; None for other requests."""
        job = self._jobs.get(request.request_id)
        if job is None and (params := unpack(request, PrefillJobParams)) is not None:
            of = WritingAttempt(
                request.request_id,
                params.engine_id,
                num_blocks=len(params.block_ids),
                cell=params.cell,
                trace=traced(request.trace_headers),
            )
            job = self._jobs[of.attempt] = _Job(params, request, self._block_size, of)
        return job

    def _introduce(self, step: PrefillStep, job: _Job) -> None:
        """Sends the ranks the job's engine, which they connect unless it is connected."""
        step.targets[job.params.engine_id] = job.params.target
        if self.metadata is not None and len(self.metadata.ranks) > 1:
            self._own = self._own or encode(self.metadata)
            step.own = self._own

    def _end(self, request_id: str, outcome: str, detail: str = "") -> None:
        del self._jobs[request_id]
        self.stats.append(ENDED, [request_id, outcome, detail])

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[None]:
        engine = self._config.namespace, self._config.engine_id
        async with (
            self._clients.messaging() as messaging,
            messaging.serve(names.describe_subject(*engine), self._on_describe),
        ):
            yield

    async def _on_describe(self, _payload: bytes) -> bytes | None:
        if self.metadata is None:
            return None
        return encode(
            EngineStatus(
                metadata=self.metadata,
                free_blocks=self._pool.get_num_free_blocks(),
                total_blocks=self._pool.num_gpu_blocks,
                last_step_age_s=self._now() - self._stepped_at,
            )
        )
