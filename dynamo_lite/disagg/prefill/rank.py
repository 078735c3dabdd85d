"""The worker half of a prefill engine: one rank that writes KV into peers.

It takes the engine's steps and reports which attempts have ended. `block_writes.py` writes
blocks, `prefix_reads.py` reads prefixes.
"""

from collections.abc import Callable

from dynamo_lite.disagg.counters import Counters
from dynamo_lite.disagg.messages import PrefillStep, PrefixRead, RankResults, WorkerReport
from dynamo_lite.disagg.prefill.block_writes import BlockWrites
from dynamo_lite.disagg.prefill.outgoing import Ready
from dynamo_lite.disagg.prefill.prefix_reads import PrefixReads
from dynamo_lite.disagg.prefill.remote_ranks import RemoteRanks
from dynamo_lite.disagg.prefill.staging import OpenTransposer, Staging
from dynamo_lite.protocol.records import RankMetadata
from dynamo_lite.runtime.clock import SYSTEM_CLOCK, Clock
from dynamo_lite.runtime.permits import Permit, PermitVerdict, always_granted, no_grant
from dynamo_lite.transfer.base import Mover


class PrefillRank:
    """own: this rank's memory. rank: its index. alive: whether the fence is open. verdict: whether
    the claim of an attempt was granted, by its permit. grant_of: then, the id of the grant.

    open_transposer: makes staging memory for peers with other blocks; None: such peers are refused.
    """

    def __init__(
        self,
        mover: Mover,
        own: RankMetadata,
        rank: int,
        alive: Callable[[], bool],
        clock: Clock = SYSTEM_CLOCK,
        *,
        verdict: Callable[[Permit], PermitVerdict] = always_granted,
        grant_of: Callable[[Permit], int] = no_grant,
        open_transposer: OpenTransposer | None = None,
    ):
        self._mover, self._alive, self._verdict = mover, alive, verdict
        self.stats = stats = Counters()
        self.on_gpu = own.memory == "VRAM"
        staging = Staging(mover, own, open_transposer)
        self._peers = peers = RemoteRanks(mover, own, rank, staging)
        self._writes = BlockWrites(
            mover,
            own.memory,
            rank,
            peers,
            staging,
            stats,
            alive=alive,
            verdict=verdict,
            grant_of=grant_of,
            now=clock.monotonic,
        )
        self._reads = PrefixReads(mover, own, peers, verdict, alive, stats)
        #: Reads of attempts whose claims are not answered.
        self._awaiting_claim: list[PrefixRead] = []
        #: Attempt -> request id, of finished requests whose writes are not reported as ended.
        self._ended: dict[str, str] = {}
        #: Attempt -> reason, for the next report.
        self._failures: dict[str, str] = {}

    def step(self, step: PrefillStep, ready: Ready) -> None:
        """Takes this step's reads, writes and ended requests, and starts what can start."""
        self._peers.update(step)
        for read in step.reads:
            self._peers.ensure_connected(read.target_engine)
            self._awaiting_claim.append(read)
        for write in step.writes:
            self._writes.add(write, ready)
        for attempt_id, request_id, complete in step.ended:
            self._ended[attempt_id] = request_id
            if not complete:
                self._writes.stop(attempt_id)
        self._pump()

    def drain_preempted(self, step: PrefillStep) -> None:
        """Ends all writes from blocks of preempted attempts; see `BlockWrites.drain`."""
        self._writes.drain(step.preempted)

    def results(self) -> RankResults:
        """Returns requests whose writes have all ended, and those whose reads have, each once."""
        self._pump()
        if (self._writes or self._reads) and self._alive():
            self._mover.notices()
        sent: set[str] = set()
        for attempt_id, request_id in list(self._ended.items()):
            if self._writes.unfinished(attempt_id):
                continue
            if (failure := self._writes.close(attempt_id)) is not None:
                self._failures[attempt_id] = failure
            del self._ended[attempt_id]
            sent.add(request_id)
        if self._peers.failing:
            self._peers.remove_failing(self._writes.in_flight | self._reads.in_flight)
        read = self._reads.take()
        if self._peers.left:
            users = {read.target_engine for read in self._awaiting_claim}
            self._peers.forget_left(users | self._writes.engines | self._reads.engines)
        return RankResults(sent=sent, received=read.received, lost=read.lost)

    def report(self) -> WorkerReport | None:
        """Returns failures of the attempts in the last `results`, links that broke, and engines
        whose metadata this rank lacks."""
        broken, self._peers.broken = self._peers.broken, {}
        unknown, self._peers.unknown = self._peers.unknown, set()
        if not (self._failures or broken or unknown):
            return None
        failures, self._failures = self._failures, {}
        return WorkerReport(failures=failures, broken=broken, unknown=unknown)

    def close(self) -> None:
        # With a closed fence, transfers in flight must not be touched; they end with the process.
        if self._alive() or not self._writes.in_flight:
            self._mover.close()

    def _pump(self) -> None:
        reads, self._awaiting_claim = self._awaiting_claim, []
        for read in reads:
            if self._verdict(read.permit) is PermitVerdict.PENDING:
                self._awaiting_claim.append(read)
            else:
                self._reads.start(read)
        self._reads.poll()
        self._writes.pump()
