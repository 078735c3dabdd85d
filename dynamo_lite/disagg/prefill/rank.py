"""The worker half of a prefill engine: one rank that writes KV into peers.

It takes the engine's steps and reports which attempts have ended. It writes the blocks of an
attempt as they complete, into every rank of the decode engine that needs a part of them; each write
carries a notification. The last write into each rank is the commit. Writes are not ordered, so it
starts only when all earlier ones have ended. Writes start only while the attempt's claim holds.
Those in flight are polled for `move_s` more: polling moves data, and the decode engine keeps the
blocks for a limited time.
`staging.py` converts blocks for peers with other blocks, `prefix_reads.py` reads prefixes.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dynamo_lite.disagg.counters import Counters, note_child
from dynamo_lite.disagg.messages import (
    NOT_HELD,
    BlockWrite,
    PrefillStep,
    RankResults,
    WorkerReport,
    WritingAttempt,
)
from dynamo_lite.disagg.metrics import BYTES, DESCRIPTORS, SECONDS, STOPPED
from dynamo_lite.disagg.prefill.prefix_reads import PrefixReads
from dynamo_lite.disagg.prefill.remote_ranks import RemoteRank, RemoteRanks
from dynamo_lite.disagg.prefill.staging import OpenTransposer, Staging, StagingSlot, split
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import TransferError
from dynamo_lite.protocol.prefill import NULL_BLOCK, Written
from dynamo_lite.protocol.records import RankMetadata
from dynamo_lite.runtime.claim_cells import Until
from dynamo_lite.runtime.clock import SYSTEM_CLOCK, Clock
from dynamo_lite.transfer.base import Mover, PollLimit, Transfer
from dynamo_lite.transfer.block_map import descriptors

#: A write to a dead peer ends in an error within a few seconds.
_PREEMPTION_DRAIN_S = 30.0

#: How long a step may wait for its commit to be sent.
_COMMIT_POLL_S = 0.002

#: Returns whether the step that fills the blocks has ended (work on a GPU is queued).
Ready = Callable[[], bool]


@dataclass
class _InFlightWrite:
    """A write in flight."""

    write: Transfer
    #: Monotonic time of the start.
    started: float
    #: Whether it is the last write of the attempt.
    last: bool
    #: The staging slot that it reads from; None if it reads blocks.
    slot: StagingSlot | None
    of: BlockWrite


@dataclass
class OutgoingAttempt:
    """The writes of one attempt."""

    of: WritingAttempt
    #: The latest end of the claim that was seen, in seconds of CLOCK_BOOTTIME.
    until: float = 0.0
    #: Whether its request has finished, so that no write is added any more.
    ended: bool = False
    #: Writes that were not started.
    queue: deque[tuple[BlockWrite, Ready]] = field(default_factory=deque)
    in_flight: list[_InFlightWrite] = field(default_factory=list)
    #: The staging slot of the first write in `queue`, if it has one.
    slot: StagingSlot | None = None
    #: Why nothing more of the attempt is written.
    failure: str | None = None


class PrefillRank:
    """own: this rank's memory. rank: its index. until: until when claims hold. move_s: for how long
    after that the writes in flight may go on. limit: until when that is, for all transfers of the
    mover; shared with one that polls by itself.

    open_transposer: makes staging memory for peers with other blocks; None: such peers are refused.
    """

    def __init__(
        self,
        mover: Mover,
        own: RankMetadata,
        rank: int,
        until: Until,
        clock: Clock = SYSTEM_CLOCK,
        *,
        move_s: float = math.inf,
        limit: PollLimit | None = None,
        open_transposer: OpenTransposer | None = None,
    ):
        self._mover, self._memory, self._rank = mover, own.memory, rank
        self._until, self._move_s, self._limit = until, move_s, limit or PollLimit()
        self._now, self._boottime = clock.monotonic, clock.boottime
        self.stats = Counters()
        self.on_gpu = own.memory == "VRAM"
        self._staging = Staging(mover, own, open_transposer)
        self._peers = RemoteRanks(mover, own, rank, self._staging)
        self._reads = PrefixReads(mover, own, self._peers, until, clock.boottime, self.stats)
        self._attempts: dict[str, OutgoingAttempt] = {}
        #: Attempt -> reason, for the next report.
        self._failures: dict[str, str] = {}

    def step(self, step: PrefillStep, ready: Ready) -> None:
        """Takes this step's reads, writes and ended requests, and starts what can start."""
        self._check_limit()
        self._peers.meet(step, self._in_use)
        for read in step.reads:
            self._reads.start(read)
        for write in step.writes:
            self._add(write, ready)
        for name, complete in step.ended:
            attempt = self._attempts[name]
            attempt.ended = True
            if not complete:
                self._clear(attempt)
        self._pump()

    def results(self) -> RankResults:
        """Returns attempts whose writes have all ended, and those whose reads have, each once."""
        self._pump()
        if self._attempts or self._reads.open:
            self._mover.notices()
        ended = [
            name
            for name, attempt in self._attempts.items()
            if attempt.ended and not (attempt.in_flight or attempt.queue)
        ]
        for name in ended:
            if (failure := self._attempts.pop(name).failure) is not None:
                self._failures[name] = failure
        if self._peers.ending:
            writing = {each.of.target_engine for each in self._attempts.values() if each.in_flight}
            self._peers.remove_ended(writing | self._reads.in_flight)
        results = self._reads.take() if self._reads.open else RankResults()
        results.sent = set(ended)
        return results

    def report(self) -> WorkerReport | None:
        """Returns failures of the attempts in the last `results`, and links that broke."""
        broken, self._peers.broken = self._peers.broken, {}
        if not (self._failures or broken):
            return None
        failures, self._failures = self._failures, {}
        return WorkerReport(failures=failures, broken=broken)

    def close(self) -> None:
        # Writes in flight that must not arrive any more must not be touched; they end with the
        # process.
        if self._boottime() < self._limit.until:
            self._mover.close()

    def _pump(self) -> None:
        """Starts what can start, and sees what has ended."""
        self._check_limit()
        if self._reads.open:
            self._reads.poll()
            self._check_limit()
        for attempt in self._attempts.values():
            self._poll(attempt)
            while attempt.queue and self._start_next(attempt):
                pass
            self._poll(attempt)

    def _check_limit(self) -> None:
        """To be called before any call of the mover that makes progress: it moves the data of all
        transfers. Raises TransferError if one is in flight that must not arrive any more."""
        limit = math.inf
        for attempt in self._attempts.values():
            if all(flight.write.over for flight in attempt.in_flight):
                continue
            attempt.until = max(attempt.until, self._until(attempt.of.cell))
            limit = min(limit, attempt.until + self._move_s)
            if self._boottime() >= attempt.until + self._move_s:
                # This ends the engine, which might else write into another request's blocks.
                raise TransferError(
                    attempt.of.target_engine,
                    f"a write is in flight {self._move_s:g} s after the end of its claim",
                )
        self._limit.until = limit

    def _in_use(self) -> set[str]:
        """The engines that are written to, or will be, or read from."""
        writing = {attempt.of.target_engine for attempt in self._attempts.values()}
        return writing | self._reads.in_flight

    def _add(self, write: BlockWrite, ready: Ready) -> None:
        """To be started as soon as it may start."""
        attempt = self._attempts.setdefault(write.of.attempt, OutgoingAttempt(write.of))
        if attempt.failure is not None:
            return
        try:
            layout = self._peers.of(write.of.target_engine).layout
        except TransferError as exc:
            self._fail(attempt, exc)
            return
        parts = [write] if layout is None else split(write, layout)
        attempt.queue += [(part, ready) for part in parts]

    def drain_preempted(self, step: PrefillStep) -> None:
        """Ends all writes from blocks of preempted attempts, which are about to be overwritten.

        Waits for writes in flight: a commit of overwritten data must not arrive, and what is
        written again must arrive later. A write to a dead peer ends in an error by itself. Raises
        TransferError after 30 s.
        """
        deadline = self._now() + _PREEMPTION_DRAIN_S
        for attempt in [self._attempts[a] for a in step.preempted if a in self._attempts]:
            if any(write.last for write, _ in attempt.queue):
                # The scheduler half counts the job as complete, and will not repeat the write.
                attempt.failure = "preempted before its last write"
            self._clear(attempt)
            while attempt.in_flight:
                if self._now() > deadline:
                    # This ends the engine, which might else send another request's KV.
                    raise TransferError(
                        attempt.of.target_engine,
                        f"a write of a preempted job does not end within {_PREEMPTION_DRAIN_S:g} s",
                    )
                self._check_limit()
                self._poll(attempt)

    def _start_next(self, attempt: OutgoingAttempt) -> bool:
        """Starts the attempt's next write if it may start now; returns whether it was taken."""
        write, ready = attempt.queue[0]
        if not self._holds(attempt) or not ready() or (write.last and attempt.in_flight):
            return False
        try:
            if not self._staged(attempt, write):
                return False
            attempt.queue.popleft()
            self._start(attempt, write)
        except (TransferError, ValueError, LookupError) as exc:
            self._fail(attempt, exc)
        self._release_slot(attempt)
        return True

    def _holds(self, attempt: OutgoingAttempt) -> bool:
        """Whether its claim holds; if not, nothing more is written."""
        until = self._until(attempt.of.cell)
        if self._boottime() < until:
            attempt.until = max(attempt.until, until)
            return True
        attempt.failure = NOT_HELD
        self._clear(attempt)
        self.stats.add(STOPPED)
        return False

    def _staged(self, attempt: OutgoingAttempt, write: BlockWrite) -> bool:
        """Whether the write's bytes can be read. If they need staging, starts that first."""
        layout = self._peers.of(write.of.target_engine).layout
        if layout is None:
            return True
        if attempt.slot is None:
            attempt.slot = self._staging.fill(layout, write)
        return attempt.slot is not None and attempt.slot.filled()

    def _start(self, attempt: OutgoingAttempt, write: BlockWrite) -> None:
        started = self._now()
        if write.last and self._rank == 0:
            self.stats.add_stage("compute", started - write.of.scheduled)
        self._limit.until = min(self._limit.until, attempt.until + self._move_s)
        peers = self._peers.of(write.of.target_engine).ranks
        for peer in peers:
            if not self._holds(attempt):
                break
            last = write.last and peer is peers[-1]
            transfer = self._write(write, peer, attempt.slot)
            if transfer is None:
                continue
            attempt.in_flight.append(_InFlightWrite(transfer, started, last, attempt.slot, write))
            if attempt.slot is not None:
                attempt.slot.users += 1
        if write.last:
            # Its notification is only sent when a poll sees its end. The next poll may be a whole
            # step away, while the decode engine's client waits.
            until = self._now() + _COMMIT_POLL_S
            while attempt.in_flight and self._now() < until:
                self._poll(attempt)

    def _clear(self, attempt: OutgoingAttempt) -> None:
        """Drops all writes that were not started."""
        attempt.queue.clear()
        self._release_slot(attempt)

    def _release_slot(self, attempt: OutgoingAttempt) -> None:
        if attempt.slot is not None:
            self._staging.release(attempt.slot)
            attempt.slot = None

    def _write(
        self, write: BlockWrite, peer: RemoteRank, slot: StagingSlot | None
    ) -> Transfer | None:
        """Starts the write into one rank; None if it has no layer that needs these blocks."""
        local_ids = write.local_ids if slot is None else range(len(write.remote_ids))
        groups = [(local_ids, write.remote_ids), *write.other_groups]
        if write.other_groups and any(NULL_BLOCK in local for local, _ in groups):
            raise ValueError("a block was given back before it was written")
        local_side, remote_side = descriptors(peer.blocks, groups)
        if not len(local_side):
            return None
        if slot is not None:
            local_side[:, 0] += np.uint64(slot.address)
        self.stats.add(BYTES, int(local_side[:, 1].sum()))
        self.stats.add(DESCRIPTORS, len(local_side))
        notice = Written(
            attempt=write.of.attempt,
            claim=write.of.cell.claim,
            rank=self._rank,
            first=0 if write.last else write.first,
            num_blocks=write.of.num_blocks if write.last else len(write.remote_ids),
            writers=peer.writers,
            parts=list(peer.parts),
            last=write.last,
        )
        memory = (self._memory, peer.memory)
        return self._mover.write(
            peer.name, local_side, remote_side, memory=memory, notice=encode(notice)
        )

    def _poll(self, attempt: OutgoingAttempt) -> None:
        still: list[_InFlightWrite] = []
        for flight in attempt.in_flight:
            try:
                if not flight.write.done():
                    still.append(flight)
                    continue
                self._ended(flight, self._now())
            except TransferError as exc:
                self._fail(attempt, exc)
            if flight.slot is not None:
                self._staging.release(flight.slot)
        attempt.in_flight = still

    def _ended(self, flight: _InFlightWrite, at: float) -> None:
        """Counts how long a write took. Only the first rank, which is on the scheduler's host,
        reports stages and spans."""
        write, took_s = flight.of, at - flight.started
        self.stats.append(SECONDS, took_s)
        if self._rank:
            return
        if flight.last:
            self.stats.add_stage("write", took_s)
        if write.of.trace is not None:
            about = {"dynamo_lite.blocks": len(write.remote_ids), "dynamo_lite.last": write.last}
            note_child(self.stats, "transfer", write.of.trace, flight.started, at, about)

    def _fail(self, attempt: OutgoingAttempt, why: Exception) -> None:
        """Disconnects a failed peer: it may be dead. Once nothing is in flight, the next job
        connects it again."""
        attempt.failure = str(why)
        self._clear(attempt)
        if isinstance(why, TransferError):
            self._peers.failed(attempt.of.target_engine, why)
