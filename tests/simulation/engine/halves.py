"""The remote prefill halves inside a simulated engine, called in vLLM's order."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

from dynamo_lite.disagg.attempts.ledger import AttemptState, Outcome
from dynamo_lite.disagg.bridge import OpenSession
from dynamo_lite.disagg.counters import Counters
from dynamo_lite.disagg.decode.rank import DecodeRank
from dynamo_lite.disagg.decode.scheduler import DecodeScheduler
from dynamo_lite.disagg.engine_api import Block
from dynamo_lite.disagg.messages import BlockWrite, PrefixRead, RankResults, WorkerReport
from dynamo_lite.disagg.prefill.rank import PrefillRank
from dynamo_lite.disagg.prefill.remote_ranks import RemoteRank
from dynamo_lite.disagg.prefill.scheduler import PrefillScheduler
from dynamo_lite.disagg.prefill.staging import StagingSlot
from dynamo_lite.runtime.clock import Clock
from dynamo_lite.transfer.base import Transfer
from tests.simulation.engine.model import SimRequest
from tests.simulation.engine.mover import SimMover
from tests.simulation.engine.scheduler import StepPlan

S = TypeVar("S", DecodeScheduler, PrefillScheduler)
R = TypeVar("R", DecodeRank, PrefillRank)


class TaskBridge:
    """Implements Bridge for an engine whose steps and network share an event loop.

    Instead of `start`, enter `running`.
    """

    def __init__(self, session: OpenSession):
        self.running = session

    def start(self, timeout_s: float) -> None:
        raise NotImplementedError("a coroutine cannot be waited for here")

    def call(self, callback: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(callback)

    def close(self) -> None:
        """Leaving `running` ends it."""


class _Halves(Generic[S, R]):
    """Both halves of an engine. A step is the scheduler half's message to the rank."""

    def __init__(self, scheduler: S, rank: R):
        self.scheduler, self.rank = scheduler, rank

    def running(self) -> AbstractAsyncContextManager[None]:
        assert isinstance(self.scheduler.bridge, TaskBridge)
        return self.scheduler.bridge.running()

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def worker_output(self, results: RankResults, report: WorkerReport | None) -> None:
        self.scheduler.worker_output(results, report)

    def take_counts(self) -> dict[str, Any]:
        """As one step's: numbers add up, lists follow each other."""
        merged = Counters()
        for counts in (self.scheduler.stats.take(), self.rank.stats.take()):
            for name, value in counts.items():
                if isinstance(value, list):
                    for item in value:
                        merged.append(name, item)
                else:
                    merged.add(name, value)
        return merged.data


class DecodeHalves(_Halves[DecodeScheduler, DecodeRank]):
    """asked: attempt -> its request, and the blocks that were offered for it: to be written,
    and to be read.
    """

    def __init__(self, scheduler: DecodeScheduler, rank: DecodeRank, block_size: int):
        super().__init__(scheduler, rank)
        self._size = block_size
        self._offered: dict[str, tuple[SimRequest, frozenset[int], frozenset[int]]] = {}
        self.asked: dict[str, tuple[SimRequest, frozenset[int], frozenset[int]]] = {}

    def held(self, attempt: str) -> Sequence[Block]:
        """The blocks that are held because a writer of the attempt may write."""
        record = self.scheduler.prefills._by_attempt.get(attempt)
        return () if record is None else record.held

    def outcome(self, attempt: str) -> Outcome | None:
        """How the attempt ended for its request, while its blocks are held; None: not yet."""
        record = self.scheduler.prefills._by_attempt.get(attempt)
        return None if record is None else record.outcome

    def queued(self, attempt: str) -> bool:
        """Whether no writer has claimed the attempt, which is still wanted."""
        entry = self.scheduler._attempts.ledger.get(attempt)
        return entry is not None and entry.state is AttemptState.QUEUED

    def awaits_claim(self, attempt: str, now: float) -> bool:
        """Whether the attempt is wanted, and may still be claimed."""
        entry = self.scheduler._attempts.ledger.get(attempt)
        return entry is not None and entry.state is AttemptState.QUEUED and now < entry.deadline

    def stage(self, request: SimRequest) -> tuple[str | None, AttemptState | None]:
        """The attempt that a request waits for or has left in quarantine, and its state."""
        ledger = self.scheduler._attempts.ledger
        for attempt, (asker, _, _) in reversed(self.asked.items()):
            if asker is request and (entry := ledger.get(attempt)) is not None:
                return attempt, entry.state
        return None, None

    def writes(self, attempt: str) -> bool:
        """Whether it was claimed by a writer that has not sent `Done`."""
        entry = self.scheduler._attempts.ledger.get(attempt)
        return entry is not None and bool(entry.claim) and not entry.done

    def unsettled(self) -> str | None:
        """What the halves still wait for, as text; None when nothing is left."""
        records = self.scheduler.prefills._by_attempt.items()
        if held := [attempt for attempt, record in records if record.held]:
            return f"attempts {', '.join(held)} are in quarantine"
        if self.scheduler.prefills:
            return f"the scheduler half keeps {self.scheduler.prefills!r}"
        if self.scheduler.busy:
            return "the scheduler half is busy"
        return None

    def matched(self, request: SimRequest, cached: int) -> tuple[int | None, bool]:
        return self.scheduler.num_new_matched_tokens(request, cached)

    def allocated(self, request: SimRequest, external: int) -> None:
        self.scheduler.state_after_alloc(request, [request.block_ids], external)
        if external:
            first = (request.num_prompt_tokens - 1 - external) // self._size
            prefix, targets = request.block_ids[:first], request.block_ids[first:]
            self._offered[request.request_id] = request, frozenset(targets), frozenset(prefix)

    def build_step(self, plan: StepPlan) -> Any:
        step = self.scheduler.build_step(plan.filling)
        for attempt, request_id in step.expect.items():
            self.asked[attempt] = self._offered.pop(request_id)
        return step

    def before_forward(self, step: Any) -> None:
        """Remote KV is written by the peer."""

    def after_forward(self, step: Any) -> tuple[RankResults, WorkerReport | None]:
        self.rank.step(step)
        return self.rank.results(), self.rank.report()

    def finished(self, request: SimRequest) -> bool:
        self.scheduler.request_finished(request.request_id)
        return False


def watch(rank: PrefillRank, mover: SimMover) -> None:
    """Gives the mover the attempt of each write and read of the rank, for the invariants."""
    start_write, start_read = rank._write, rank._reads.start

    def write(write: BlockWrite, peer: RemoteRank, slot: StagingSlot | None) -> Transfer | None:
        mover.attempt = write.of.attempt
        return start_write(write, peer, slot)

    def read(read: PrefixRead) -> None:
        mover.attempt = read.of.attempt
        mover.cells[read.of.attempt] = read.of.cell
        start_read(read)

    rank._write, rank._reads.start = write, read


class PrefillHalves(_Halves[PrefillScheduler, PrefillRank]):
    def __init__(self, scheduler: PrefillScheduler, rank: PrefillRank, mover: SimMover):
        super().__init__(scheduler, rank)
        self._mover = mover
        watch(rank, mover)

    def matched(self, request: SimRequest, cached: int) -> tuple[int, bool]:
        return self.scheduler.num_new_matched_tokens(request, cached)

    def allocated(self, request: SimRequest, external: int) -> None:
        self.scheduler.state_after_alloc(request, request.block_ids, external, request.arrived)

    def build_step(self, plan: StepPlan) -> Any:
        return self.scheduler.build_step(plan.num_scheduled_tokens, plan.preempted)

    def before_forward(self, step: Any) -> None:
        if step.preempted:
            self._mover.hurry()
            self.rank.drain_preempted(step)

    def after_forward(self, step: Any) -> tuple[RankResults, WorkerReport | None]:
        # A step has ended when its KV is written.
        self.rank.step(step, lambda: True)
        return self.rank.results(), self.rank.report()

    def finished(self, request: SimRequest) -> bool:
        return self.scheduler.request_finished(request)


def rank_clock(clock: Clock) -> Clock:
    """`clock`, where each reading takes a little time: a rank's busy loops end in virtual time."""
    looks = itertools.count()
    return Clock(
        monotonic=lambda: clock.monotonic() + next(looks) * 1e-4,
        wall=clock.wall,
        boottime=clock.boottime,
    )
