"""The worker half of a prefill engine: one rank that writes KV into peers.

It takes the engine's steps and reports which attempts have ended. `block_writes.py` writes
blocks, `prefix_reads.py` reads prefixes, `link_test_rank.py` tests links.
"""

from collections.abc import Callable

from dynamo_lite.disagg.counters import Counters
from dynamo_lite.disagg.messages import PrefillStep, PrefixRead, RankResults, WorkerReport
from dynamo_lite.disagg.prefill.block_writes import BlockWrites
from dynamo_lite.disagg.prefill.link_test_rank import LinkTestRank
from dynamo_lite.disagg.prefill.outgoing import Ready
from dynamo_lite.disagg.prefill.prefix_reads import PrefixReads
from dynamo_lite.disagg.prefill.remote_ranks import RemoteRanks
from dynamo_lite.disagg.prefill.staging import OpenTransposer, Staging
from dynamo_lite.protocol.records import RankMetadata
from dynamo_lite.runtime.clock import SYSTEM_CLOCK, Clock
from dynamo_lite.runtime.permits import Permit, PermitVerdict, always_granted, no_grant
from dynamo_lite.transfer.base import Mover
from dynamo_lite.transfer.scratch import ScratchMemory


class PrefillRank:
    """own: this rank's memory. rank: its index. alive: whether the fence is open. verdict: whether
    the claim of an attempt was granted, by its permit. grant_of: then, the id of the grant.

    open_transposer: makes staging memory for peers with other blocks; None: such peers are refused.
    scratch: memory for link tests.
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
        scratch: ScratchMemory | None = None,
    ):
        self._mover, self._rank, self._alive, self._verdict = mover, rank, alive, verdict
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
        self._link_tests = LinkTestRank(
            mover,
            own,
            rank,
            scratch,
            peers,
            alive,
            lambda: self._writes.in_flight | self._reads.engines,
            clock.monotonic,
        )
        #: Reads of attempts whose claims are not answered.
        self._awaiting_claim: list[PrefixRead] = []
        #: Attempt -> request id, of finished requests whose writes are not reported as ended.
        self._ended: dict[str, str] = {}
        #: Attempt -> reason, for the next report.
        self._failures: dict[str, str] = {}

    def step(self, step: PrefillStep, ready: Ready) -> None:
        """Takes this step's reads, writes and ended requests, and starts what can start."""
        self._peers.update(step)
        for order in step.link_tests:
            self._link_tests.start(order)
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
        if (self._writes or self._reads or self._link_tests) and self._alive():
            self._mover.notices()
        sent: set[str] = set()
        for attempt_id, request_id in list(self._ended.items()):
            if self._writes.unfinished(attempt_id):
                continue
            if (failure := self._writes.close(attempt_id)) is not None:
                self._failures[attempt_id] = failure
            del self._ended[attempt_id]
            sent.add(request_id)
        if self._peers.left:
            users = {read.target_engine for read in self._awaiting_claim}
            users |= self._writes.engines | self._reads.engines | self._link_tests.engines
            self._peers.forget_left(users)
        read = self._reads.take()
        return RankResults(sent=sent, received=read.received, lost=read.lost)

    def report(self) -> WorkerReport | None:
        """Returns failures of the attempts in the last `results`, finished link tests, and engines
        whose metadata this rank lacks."""
        links = {order: {self._rank: link} for order, link in self._link_tests.take().items()}
        unknown, self._peers.unknown = self._peers.unknown, set()
        if not (self._failures or links or unknown):
            return None
        failures, self._failures = self._failures, {}
        return WorkerReport(failures=failures, links=links, unknown=unknown)

    def close(self) -> None:
        # With a closed fence, transfers in flight must not be touched; they end with the process.
        if self._alive() or not (self._writes.in_flight or self._link_tests):
            self._mover.close()

    def _pump(self) -> None:
        reads, self._awaiting_claim = self._awaiting_claim, []
        for read in reads:
            if self._verdict(read.permit) is PermitVerdict.PENDING:
                self._awaiting_claim.append(read)
            else:
                self._reads.start(read)
        self._reads.poll()
        self._link_tests.poll()
        self._writes.pump()
