"""The worker half of a prefill engine: one rank that writes KV into peers.

Writes of an attempt go out as their blocks complete, into every rank of the decode
engine that needs some of them, each with a notice of what it brings. The last one
into each rank commits; since no order holds between writes, it starts only when all earlier ones
have ended. Nothing is written, and no write is moved on, unless this process's lease
is certainly alive. Blocks for peers whose own differ are put together in `staging.py`
first; layers before the end of their step go by `layer_stream.py`, and prefixes are read by
`prefix_reads.py`.
"""

from collections.abc import Callable

import numpy as np

from dynamo_lite.disagg.counters import BYTES, DESCRIPTORS, FENCED, Counters
from dynamo_lite.disagg.messages import (
    BlockWrite,
    PrefillStep,
    PrefixRead,
    RankResults,
    WorkerReport,
)
from dynamo_lite.disagg.prefill.layer_stream import LayerStream
from dynamo_lite.disagg.prefill.link_test_rank import LinkTestRank
from dynamo_lite.disagg.prefill.outgoing import InFlightWrite, OutgoingAttempt, Ready
from dynamo_lite.disagg.prefill.prefix_reads import PrefixReads
from dynamo_lite.disagg.prefill.remote_ranks import RemoteRank, RemoteRanks
from dynamo_lite.disagg.prefill.staging import OpenTransposer, Staging, split
from dynamo_lite.disagg.prefill.write_notifications import WriteNotifications
from dynamo_lite.disagg.prefill.write_times import WriteTimes
from dynamo_lite.protocol.errors import TransferError
from dynamo_lite.protocol.records import RankMetadata
from dynamo_lite.runtime.clock import SYSTEM_CLOCK, Clock
from dynamo_lite.transfer.base import Mover, Transfer
from dynamo_lite.transfer.block_map import BlockMap
from dynamo_lite.transfer.digest import ReadMemory, read_dram
from dynamo_lite.transfer.scratch import ScratchMemory

#: A write to a dead peer ends in an error within a few seconds.
_PREEMPTION_DRAIN_S = 30.0

#: How long a step may be held up for a commit to leave.
_SEE_OFF_S = 0.002


class PrefillRank:
    """own: this rank's memory; rank: its index; alive: the lease's fence.

    checksum_rate: share of an attempt's blocks whose contents its commit vouches
    for; read: reads them from this rank's memory. open_transposer: where blocks are put
    together for peers whose own differ; None refuses these.
    scratch: for preflights.
    """

    def __init__(
        self,
        mover: Mover,
        own: RankMetadata,
        rank: int,
        alive: Callable[[], bool],
        clock: Clock = SYSTEM_CLOCK,
        *,
        checksum_rate: float = 0.0,
        read: ReadMemory = read_dram,
        open_transposer: OpenTransposer | None = None,
        scratch: ScratchMemory | None = None,
    ):
        self._now = clock.monotonic
        self._mover, self._own, self._rank, self._alive = mover, own, rank, alive
        self.stats = Counters()
        self._times = WriteTimes(self.stats, rank)
        self.on_gpu = own.memory == "VRAM"
        self._staging = Staging(mover, own, open_transposer)
        self._notices = WriteNotifications(rank, checksum_rate, read, self._staging)
        self._peers = RemoteRanks(mover, own, rank, self._staging)
        self._attempts: dict[str, OutgoingAttempt] = {}
        self._ended: dict[str, str] = {}
        self._failures: dict[str, str] = {}
        self._layers = LayerStream(
            self._attempts, self._peers, lambda: self._alive(), self._start_layer
        )
        self._reads = PrefixReads(mover, own, self._peers, lambda: self._alive(), self.stats)
        self._preflights = LinkTestRank(
            mover, own, rank, scratch, self._peers, lambda: self._alive(), self._now
        )

    def step(self, step: PrefillStep, ready: Ready) -> None:
        """Takes this step's reads, writes and endings, and starts what can start."""
        self._peers.hear(step)
        for order in step.preflights:
            self._preflights.start(order)
        for read in step.reads:
            self._peers.greet(read.target_engine)
            self._start_read(read)
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
        """The step has run this layer, and `step` follows; ready: see `LayerStream.ran`."""
        self._peers.hear(step)
        for write in step.writes:
            self._open(write)
        self._layers.ran(step.writes, layer, ready)
        self._pump()

    def drain_preempted(self, step: PrefillStep) -> None:
        """Blocks of these attempts are about to be overwritten: no write may read them.

        Waits for what is under way, unless it reads from a slot: a commit whose data was
        overwritten must not arrive. A dead peer's write ends in an error by itself.
        """
        deadline = self._now() + _PREEMPTION_DRAIN_S
        self._layers.forget(*step.preempted)
        for attempt in [self._attempts[a] for a in step.preempted if a in self._attempts]:
            if any(write.last for write, _ in attempt.queue):
                # The engine takes the job for complete, and will not ask again.
                attempt.failure = "preempted before its last write"
            self._clear(attempt)
            attempt.again = True
            while any(flight.slot is None for flight in attempt.flying):
                if self._now() > deadline:
                    # Better no engine than one that sends another request's KV.
                    raise TransferError(attempt.target, "a write of a preempted job does not end")
                self._poll(attempt)

    def results(self) -> RankResults:
        """Requests whose writes have all ended, and those whose reads have, each once."""
        self._pump()
        if (self._attempts or self._reads or self._preflights) and self._alive():
            self._mover.notices()
        sent: set[str] = set()
        for attempt_id, request_id in list(self._ended.items()):
            attempt = self._attempts.get(attempt_id)
            if attempt is not None and (attempt.flying or attempt.queue):
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
            self._peers.forget_left(users | self._reads.engines | self._preflights.engines)
        read = self._reads.take()
        return RankResults(sent=sent, received=read.received, lost=read.lost)

    def report(self) -> WorkerReport | None:
        """Failures of what `results` has just ended, preflights that have ended, and engines
        that nobody has told this rank of."""
        links = {order: {self._rank: link} for order, link in self._preflights.take().items()}
        unknown, self._peers.unknown = self._peers.unknown, set()
        if not (self._failures or links or unknown):
            return None
        failures, self._failures = self._failures, {}
        return WorkerReport(failures=failures, links=links, unknown=unknown)

    def close(self) -> None:
        # What is under way behind a closed fence ends with the process, untouched.
        flying = any(attempt.flying for attempt in self._attempts.values()) or self._preflights
        if self._alive() or not flying:
            self._mover.close()

    def _start_read(self, read: PrefixRead) -> None:
        self._reads.start(read)

    def _open(self, write: BlockWrite) -> OutgoingAttempt:
        attempt = self._attempts.setdefault(write.attempt, OutgoingAttempt(write.target_engine))
        if attempt.failure is None:
            attempt.failure = self._peers.greet(write.target_engine)
        return attempt

    def _pump(self) -> None:
        self._reads.poll()
        self._layers.pump()
        self._preflights.poll()
        for attempt in self._attempts.values():
            self._poll(attempt)
            while attempt.queue and self._start_next(attempt):
                pass
            self._poll(attempt)

    def _start_next(self, attempt: OutgoingAttempt) -> bool:
        """Starts the attempt's next write if it may start now."""
        write, ready = attempt.queue[0]
        alone = write.last or attempt.again or self._layers.begun(write)
        if attempt.failure is None and (not ready() or (alone and attempt.flying)):
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
        self._let_go(attempt)
        return True

    def _staged(self, attempt: OutgoingAttempt, write: BlockWrite) -> bool:
        """Whether the write's bytes are where it reads them; if not, sees to it."""
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
                attempt.failure = "this worker's lease is not certain: nothing is written"
                self.stats.add(FENCED)
                break
            last = write.last and peer is peers[-1]
            rest = self._layers.rest(write, peer)
            transfer = self._write(write, peer, rest, says=True)
            attempt.flying.append(InFlightWrite(transfer, started, last, attempt.slot, write))
            if attempt.slot is not None:
                attempt.slot.users += 1
        if write.last:
            self._see_off(attempt)

    def _clear(self, attempt: OutgoingAttempt) -> None:
        """Nothing that waits is written any more."""
        attempt.queue.clear()
        self._let_go(attempt)

    def _let_go(self, attempt: OutgoingAttempt) -> None:
        self._staging.let_go(attempt.slot)
        attempt.slot = None

    def _see_off(self, attempt: OutgoingAttempt) -> None:
        """Polls a last write for a moment: its notice leaves only when we see it done.

        The engine's next step may be a millisecond away, and the peer's client waits.
        """
        until = self._now() + _SEE_OFF_S
        while attempt.flying and self._now() < until:
            self._poll(attempt)

    def _start_layer(
        self, attempt: OutgoingAttempt, write: BlockWrite, peer: RemoteRank, blocks: BlockMap
    ) -> None:
        started = self._now()
        try:
            layer = self._write(write, peer, blocks, says=False)
            attempt.flying.append(InFlightWrite(layer, started, last=False, slot=None))
        except (TransferError, ValueError) as exc:
            self._fail(attempt, exc)

    def _write(
        self, write: BlockWrite, peer: RemoteRank, where: BlockMap, *, says: bool
    ) -> Transfer:
        attempt = self._attempts[write.attempt]
        local_ids = write.local_ids if attempt.slot is None else range(len(write.remote_ids))
        local_side, remote_side = where.descriptors(local_ids, write.remote_ids)
        notice = self._notices.of(write, peer, attempt) if says else b""
        if attempt.slot is not None:
            local_side[:, 0] += np.uint64(attempt.slot.address)
        self.stats.add(BYTES, int(local_side[:, 1].sum()))
        self.stats.add(DESCRIPTORS, len(local_side))
        memory = (self._own.memory, peer.memory)
        return self._mover.write(peer.name, local_side, remote_side, memory=memory, notice=notice)

    def _poll(self, attempt: OutgoingAttempt) -> None:
        if not self._alive():
            # Polling moves the data on, in some transports.
            return
        still: list[InFlightWrite] = []
        for flight in attempt.flying:
            try:
                if not flight.write.done():
                    still.append(flight)
                    continue
                self._times.ended(attempt, flight, self._now())
            except TransferError as exc:
                self._fail(attempt, exc)
            self._staging.let_go(flight.slot)
        attempt.flying = still

    def _fail(self, attempt: OutgoingAttempt, why: Exception) -> None:
        """A failed peer is forgotten: it may be dead, and is met again at its next job."""
        attempt.failure = str(why)
        self._clear(attempt)
        if isinstance(why, TransferError):
            self._peers.failed(attempt.target, why.peer)
