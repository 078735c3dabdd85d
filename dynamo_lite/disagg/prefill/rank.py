"""The worker half of a prefill engine: one rank that writes KV into peers.

It takes the engine's steps and reports which attempts have ended. `block_writes.py` writes
blocks, `prefix_reads.py` reads prefixes.
"""

import math

from dynamo_lite.disagg.counters import Counters
from dynamo_lite.disagg.messages import PrefillStep, RankResults, WorkerReport
from dynamo_lite.disagg.prefill.block_writes import BlockWrites, Ready
from dynamo_lite.disagg.prefill.prefix_reads import PrefixReads
from dynamo_lite.disagg.prefill.remote_ranks import RemoteRanks
from dynamo_lite.disagg.prefill.staging import OpenTransposer, Staging
from dynamo_lite.protocol.records import RankMetadata
from dynamo_lite.runtime.claim_cells import Until
from dynamo_lite.runtime.clock import SYSTEM_CLOCK, Clock
from dynamo_lite.transfer.base import Mover, PollLimit


class PrefillRank:
    """own: this rank's memory. rank: its index. until: until when claims hold. move_s: for how long
    after that the writes in flight may go on. limit: shared with a mover that polls by itself.

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
        self._mover, self._boottime = mover, clock.boottime
        self._limit = limit = limit or PollLimit()
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
            until=until,
            move_s=move_s,
            limit=limit,
            clock=clock,
        )
        self._reads = PrefixReads(mover, own, peers, until, clock.boottime, stats)
        #: Request -> reason, for the next report.
        self._failures: dict[str, str] = {}

    def step(self, step: PrefillStep, ready: Ready) -> None:
        """Takes this step's reads, writes and ended requests, and starts what can start."""
        self._writes.check_limit()
        self._peers.update(step)
        for read in step.reads:
            self._peers.ensure_connected(read.of.target_engine)
            self._reads.start(read)
        for write in step.writes:
            self._writes.add(write, ready)
        for request_id, complete in step.ended:
            self._writes.end(request_id, complete=complete)
        self._pump()

    def drain_preempted(self, step: PrefillStep) -> None:
        """Ends all writes from blocks of preempted requests; see `BlockWrites.drain`."""
        self._writes.drain(step.preempted)

    def results(self) -> RankResults:
        """Returns requests whose writes have all ended, and those whose reads have, each once."""
        self._pump()
        if self._writes or self._reads:
            self._mover.notices()
        ended = self._writes.take_ended()
        self._failures |= {name: why for name, why in ended.items() if why is not None}
        if self._peers.ending:
            self._peers.remove_ended(self._writes.in_flight | self._reads.in_flight)
        read = self._reads.take()
        return RankResults(sent=set(ended), received=read.received, lost=read.lost)

    def report(self) -> WorkerReport | None:
        """Returns failures of the requests in the last `results`, and links that broke."""
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
        self._writes.check_limit()
        self._reads.poll()
        self._writes.pump()
