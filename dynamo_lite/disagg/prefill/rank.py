"""The worker half of a prefill engine: one rank that writes KV into peers.

It writes the blocks of an attempt as they complete, into every rank of the decode engine
that needs a part of them; each write carries a notification. The last write into each rank
is the commit. Writes are not ordered, so it starts only when all earlier ones have ended.
Writes are started and polled only while the fence is open. They are started only after the
attempt's claim was granted, since the prompt is computed while the claim is on its way.
`staging.py` converts blocks for peers with other blocks, `layer_stream.py` writes layers
before the end of their step, and `prefix_reads.py` reads prefixes.
"""

from collections.abc import Callable

import numpy as np

from dynamo_lite.disagg.counters import BYTES, DESCRIPTORS, FENCED, Counters
from dynamo_lite.disagg.messages import (
    NOT_GRANTED,
    BlockWrite,
    PrefillStep,
    PrefixRead,
    RankResults,
    WorkerReport,
)
from dynamo_lite.disagg.prefill.layer_stream import LayerStream
from dynamo_lite.disagg.prefill.link_test_rank import LinkTestRank
from dynamo_lite.disagg.prefill.outgoing import InFlightWrite, OutgoingAttempt, Ready, WriteTimes
from dynamo_lite.disagg.prefill.prefix_reads import PrefixReads
from dynamo_lite.disagg.prefill.remote_ranks import RemoteRank, RemoteRanks
from dynamo_lite.disagg.prefill.staging import OpenTransposer, Staging, split
from dynamo_lite.disagg.prefill.write_notifications import WriteNotifications
from dynamo_lite.protocol.errors import TransferError
from dynamo_lite.protocol.records import RankMetadata
from dynamo_lite.runtime.clock import SYSTEM_CLOCK, Clock
from dynamo_lite.runtime.permits import Permit, Verdict, always_granted, no_grant
from dynamo_lite.transfer.base import Mover, Transfer
from dynamo_lite.transfer.block_map import BlockMap
from dynamo_lite.transfer.digest import ReadMemory, read_dram
from dynamo_lite.transfer.scratch import ScratchMemory

#: A write to a dead peer ends in an error within a few seconds.
_PREEMPTION_DRAIN_S = 30.0

#: How long a step may wait for its commit to be sent.
_COMMIT_POLL_S = 0.002


class PrefillRank:
    """own: this rank's memory. rank: its index. alive: whether the fence is open. verdict: whether
    the claim of an attempt was granted, by its permit. grant_of: then, the id of the grant.

    checksum_rate: share of an attempt's blocks that its commit has a checksum of.
    read: reads blocks from this rank's memory. open_transposer: makes staging memory for
    peers with other blocks; None: such peers are refused. scratch: memory for link tests.
    """

    def __init__(
        self,
        mover: Mover,
        own: RankMetadata,
        rank: int,
        alive: Callable[[], bool],
        clock: Clock = SYSTEM_CLOCK,
        *,
        verdict: Callable[[Permit], Verdict] = always_granted,
        grant_of: Callable[[Permit], int] = no_grant,
        checksum_rate: float = 0.0,
        read: ReadMemory = read_dram,
        open_transposer: OpenTransposer | None = None,
        scratch: ScratchMemory | None = None,
    ):
        self._now = clock.monotonic
        self._mover, self._own, self._rank, self._alive = mover, own, rank, alive
        self._verdict, self._grant_of = verdict, grant_of
        self.stats = Counters()
        self._times = WriteTimes(self.stats, rank)
        self.on_gpu = own.memory == "VRAM"
        self._staging = Staging(mover, own, open_transposer)
        self._notices = WriteNotifications(rank, checksum_rate, read, self._staging)
        self._peers = RemoteRanks(mover, own, rank, self._staging)
        self._attempts: dict[str, OutgoingAttempt] = {}
        #: Reads of attempts whose claims are not answered.
        self._awaiting_claim: list[PrefixRead] = []
        #: Attempt -> request id, of finished requests whose writes are not reported as ended.
        self._ended: dict[str, str] = {}
        #: Attempt -> reason, for the next report.
        self._failures: dict[str, str] = {}
        self._layers = LayerStream(
            self._attempts, self._peers, self._is_granted, lambda: self._alive(), self._start_layer
        )
        self._reads = PrefixReads(
            mover, own, self._peers, self._verdict, lambda: self._alive(), self.stats
        )
        self._preflights = LinkTestRank(
            mover, own, rank, scratch, self._peers, lambda: self._alive(), self._now
        )

    def step(self, step: PrefillStep, ready: Ready) -> None:
        """Takes this step's reads, writes and ended requests, and starts what can start."""
        self._peers.update(step)
        for order in step.preflights:
            self._preflights.start(order)
        for read in step.reads:
            self._peers.ensure_connected(read.target_engine)
            self._awaiting_claim.append(read)
        for write in step.writes:
            attempt = self._open(write)
            layout = self._peers.layout(write.target_engine)
            parts = [write] if layout is None else split(write, layout)
            attempt.queue += [(part, ready) for part in parts]
            attempt.local_ids.update(enumerate(write.local_ids, write.first))
        for attempt_id, request_id, complete in step.ended:
            self._ended[attempt_id] = request_id
            if not complete and (attempt := self._attempts.get(attempt_id)) is not None:
                self._clear(attempt)
                self._layers.forget(attempt_id)
        self._pump()

    def layer(self, step: PrefillStep, layer: str, ready: Ready) -> None:
        """The step has launched this layer; `step` follows. ready: see `LayerStream.ran`."""
        self._peers.update(step)
        for write in step.writes:
            self._open(write)
        self._layers.ran(step.writes, layer, ready)
        self._pump()

    def drain_preempted(self, step: PrefillStep) -> None:
        """Ends all writes from blocks of preempted attempts, which are about to be overwritten.

        Waits for writes in flight, except those from staging slots: a commit of overwritten
        data must not arrive. A write to a dead peer ends in an error by itself. Raises
        TransferError after 30 s.
        """
        deadline = self._now() + _PREEMPTION_DRAIN_S
        self._layers.forget(*step.preempted)
        for attempt in [self._attempts[a] for a in step.preempted if a in self._attempts]:
            if any(write.last for write, _ in attempt.queue):
                # The scheduler half counts the job as complete, and will not repeat the write.
                attempt.failure = "preempted before its last write"
            self._clear(attempt)
            attempt.again = True
            while any(flight.slot is None for flight in attempt.in_flight):
                if self._now() > deadline:
                    # This ends the engine, which might else send another request's KV.
                    raise TransferError(
                        attempt.target,
                        f"a write of a preempted job does not end within {_PREEMPTION_DRAIN_S:g} s",
                    )
                self._poll(attempt)

    def results(self) -> RankResults:
        """Returns requests whose writes have all ended, and those whose reads have, each once."""
        self._pump()
        if (self._attempts or self._reads or self._preflights) and self._alive():
            self._mover.notices()
        sent: set[str] = set()
        for attempt_id, request_id in list(self._ended.items()):
            attempt = self._attempts.get(attempt_id)
            if attempt is not None and (attempt.in_flight or attempt.queue):
                continue
            if attempt is not None and attempt.failure is not None:
                self._failures[attempt_id] = attempt.failure
            elif attempt is not None:
                self._times.complete(attempt_id, attempt)
            self._attempts.pop(attempt_id, None)
            self._layers.forget(attempt_id)
            del self._ended[attempt_id]
            sent.add(request_id)
        if self._peers.left:
            users = {attempt.target for attempt in self._attempts.values()}
            users |= {read.target_engine for read in self._awaiting_claim}
            self._peers.forget_left(users | self._reads.engines | self._preflights.engines)
        read = self._reads.take()
        return RankResults(sent=sent, received=read.received, lost=read.lost)

    def report(self) -> WorkerReport | None:
        """Returns failures of the attempts in the last `results`, finished link tests, and engines
        whose metadata this rank lacks."""
        links = {order: {self._rank: link} for order, link in self._preflights.take().items()}
        unknown, self._peers.unknown = self._peers.unknown, set()
        if not (self._failures or links or unknown):
            return None
        failures, self._failures = self._failures, {}
        return WorkerReport(failures=failures, links=links, unknown=unknown)

    def close(self) -> None:
        # With a closed fence, transfers in flight must not be touched; they end with the process.
        open_writes = (
            any(attempt.in_flight for attempt in self._attempts.values()) or self._preflights
        )
        if self._alive() or not open_writes:
            self._mover.close()

    def _start_read(self, read: PrefixRead) -> None:
        self._reads.start(read)

    def _open(self, write: BlockWrite) -> OutgoingAttempt:
        attempt = self._attempts.setdefault(
            write.attempt, OutgoingAttempt(write.target_engine, write.permit)
        )
        if attempt.failure is None:
            attempt.failure = self._peers.ensure_connected(write.target_engine)
        return attempt

    def _pump(self) -> None:
        reads, self._awaiting_claim = self._awaiting_claim, []
        for read in reads:
            if self._verdict(read.permit) is Verdict.PENDING:
                self._awaiting_claim.append(read)
            else:
                self._start_read(read)
        self._reads.poll()
        self._layers.pump()
        self._preflights.poll()
        for attempt in self._attempts.values():
            self._poll(attempt)
            while attempt.queue and self._start_next(attempt):
                pass
            self._poll(attempt)

    def _start_next(self, attempt: OutgoingAttempt) -> bool:
        """Starts the attempt's next write if it may start now; returns whether it was taken."""
        write, ready = attempt.queue[0]
        if attempt.failure is None and not self._is_granted(attempt):
            return False
        alone = write.last or attempt.again or self._layers.begun(write)
        if attempt.failure is None and (not ready() or (alone and attempt.in_flight)):
            return False
        try:
            if attempt.failure is None and not self._staged(attempt, write):
                return False
            attempt.queue.popleft()
            attempt.again = False
            if attempt.failure is None:
                self._start(attempt, write)
        except (TransferError, ValueError, LookupError) as exc:
            self._fail(attempt, exc)
        self._release_slot(attempt)
        return True

    def _is_granted(self, attempt: OutgoingAttempt) -> bool:
        """Whether the attempt's claim was granted. If it was refused, nothing is written."""
        verdict = self._verdict(attempt.permit)
        if verdict is Verdict.REFUSED:
            attempt.failure = NOT_GRANTED
            self._clear(attempt)
        if verdict is Verdict.GRANTED and not attempt.grant:
            attempt.grant = self._grant_of(attempt.permit)
        return verdict is Verdict.GRANTED

    def _staged(self, attempt: OutgoingAttempt, write: BlockWrite) -> bool:
        """Whether the write's bytes can be read. If they need staging, starts that first."""
        layout = self._peers.layout(write.target_engine)
        if layout is None:
            return True
        if attempt.slot is None:
            attempt.slot = self._staging.fill(layout, write)
        return attempt.slot is not None and attempt.slot.filled()

    def _start(self, attempt: OutgoingAttempt, write: BlockWrite) -> None:
        started = self._now()
        self._times.started(attempt, write, started)
        peers = self._peers.of(write.target_engine)
        for peer in peers:
            if not self._alive():
                attempt.failure = (
                    "this worker's lease is not certain to be alive: nothing is written"
                )
                self.stats.add(FENCED)
                break
            last = write.last and peer is peers[-1]
            rest = self._layers.rest(write, peer)
            transfer = self._write(write, peer, rest, notify=True)
            attempt.in_flight.append(InFlightWrite(transfer, started, last, attempt.slot, write))
            if attempt.slot is not None:
                attempt.slot.users += 1
        if write.last:
            self._poll_commit(attempt)

    def _clear(self, attempt: OutgoingAttempt) -> None:
        """Drops all writes that were not started."""
        attempt.queue.clear()
        self._release_slot(attempt)

    def _release_slot(self, attempt: OutgoingAttempt) -> None:
        self._staging.release(attempt.slot)
        attempt.slot = None

    def _poll_commit(self, attempt: OutgoingAttempt) -> None:
        """Polls a last write for a moment: its notification is only sent when a poll sees its end.

        The next poll may be a whole step away, while the decode engine's client waits.
        """
        until = self._now() + _COMMIT_POLL_S
        while attempt.in_flight and self._now() < until:
            self._poll(attempt)

    def _start_layer(
        self, attempt: OutgoingAttempt, write: BlockWrite, peer: RemoteRank, blocks: BlockMap
    ) -> None:
        started = self._now()
        try:
            layer = self._write(write, peer, blocks, notify=False)
            attempt.in_flight.append(InFlightWrite(layer, started, last=False, slot=None))
        except (TransferError, ValueError) as exc:
            self._fail(attempt, exc)

    def _write(
        self, write: BlockWrite, peer: RemoteRank, where: BlockMap, *, notify: bool
    ) -> Transfer:
        attempt = self._attempts[write.attempt]
        local_ids = write.local_ids if attempt.slot is None else range(len(write.remote_ids))
        local_side, remote_side = where.descriptors(local_ids, write.remote_ids)
        notice = self._notices.of(write, peer, attempt) if notify else b""
        if attempt.slot is not None:
            local_side[:, 0] += np.uint64(attempt.slot.address)
        self.stats.add(BYTES, int(local_side[:, 1].sum()))
        self.stats.add(DESCRIPTORS, len(local_side))
        memory = (self._own.memory, peer.memory)
        return self._mover.write(peer.name, local_side, remote_side, memory=memory, notice=notice)

    def _poll(self, attempt: OutgoingAttempt) -> None:
        if not self._alive():
            # In some transports polling moves data.
            return
        still: list[InFlightWrite] = []
        for flight in attempt.in_flight:
            try:
                if not flight.write.done():
                    still.append(flight)
                    continue
                self._times.ended(attempt, flight, self._now())
            except TransferError as exc:
                self._fail(attempt, exc)
            self._staging.release(flight.slot)
        attempt.in_flight = still

    def _fail(self, attempt: OutgoingAttempt, why: Exception) -> None:
        """Disconnects a failed peer: it may be dead, and is connected again at its next job."""
        attempt.failure = str(why)
        self._clear(attempt)
        if isinstance(why, TransferError):
            self._peers.failed(attempt.target, why.peer)
