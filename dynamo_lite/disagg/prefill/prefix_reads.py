"""Prefixes that a prefill rank reads from a decode engine's blocks.

The decode engine keeps these blocks unchanged while the attempt's claim holds. A reader that was
suspended beyond that may have read newer content: so the claim is checked again after the read,
and if it has ended the read counts as failed.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from dynamo_lite.disagg.counters import Counters
from dynamo_lite.disagg.messages import NOT_HELD, PrefixRead, RankResults
from dynamo_lite.disagg.metrics import PREFIX_BYTES, PREFIX_READ
from dynamo_lite.disagg.prefill.remote_ranks import RemoteRank, RemoteRanks
from dynamo_lite.protocol.errors import IncompatiblePeer, TransferError
from dynamo_lite.protocol.records import RankMetadata
from dynamo_lite.runtime.claim_cells import Until
from dynamo_lite.transfer.base import Mover, Transfer
from dynamo_lite.transfer.block_map import maps_of
from dynamo_lite.transfer.sharding import join

logger = logging.getLogger(__name__)


@dataclass
class _Reading:
    read: PrefixRead
    in_flight: list[Transfer] = field(default_factory=list)
    failure: str | None = None


class PrefixReads:
    """own: this rank's memory. until: until when claims hold. boottime: see `Clock`."""

    def __init__(
        self,
        mover: Mover,
        own: RankMetadata,
        peers: RemoteRanks,
        until: Until,
        boottime: Callable[[], float],
        stats: Counters,
    ):
        self._mover, self._own, self._peers = mover, own, peers
        self._until, self._boottime, self._stats = until, boottime, stats
        #: Those that have not ended. While there are none, there is nothing to poll and to take.
        self.open: list[_Reading] = []

    @property
    def in_flight(self) -> set[str]:
        """The engines with reads in flight."""
        return {reading.read.of.target_engine for reading in self.open if reading.in_flight}

    def start(self, read: PrefixRead) -> None:
        reading = _Reading(read)
        self.open.append(reading)
        try:
            for source in self._sources(read.of.target_engine):
                if not self._holds(read):
                    reading.failure = NOT_HELD
                    return
                reading.in_flight.append(self._read(read, source))
        except (TransferError, ValueError, LookupError) as exc:
            self._fail(reading, exc)

    def poll(self) -> None:
        for reading in self.open:
            still: list[Transfer] = []
            for transfer in reading.in_flight:
                try:
                    if not transfer.done():
                        still.append(transfer)
                except TransferError as exc:
                    self._fail(reading, exc)
            reading.in_flight = still

    def take(self) -> RankResults:
        """Returns reads that ended since the last call: received, or lost and to be computed.

        A failed read may still change its blocks until its other transfers have ended and its peer
        is removed: they stay reserved until then.
        """
        results = RankResults()
        for reading in list(self.open):
            removed = reading.read.of.target_engine not in self._peers.ending
            if not reading.in_flight and (removed or reading.failure is None):
                self.open.remove(reading)
                read = self._ended(reading)
                (results.received if read else results.lost).add(reading.read.of.attempt)
        return results

    def _sources(self, engine_id: str) -> list[RemoteRank]:
        """The ranks to read from; together they hold all of this rank's share.

        Raises TransferError, IncompatiblePeer.
        """
        engine = self._peers.of(engine_id)
        if engine.sources is not None:
            return engine.sources
        lanes = join(engine_id, engine.remote, engine.own)
        if any(lane.staged for mine in lanes.values() for lane in mine):
            raise IncompatiblePeer(
                engine_id, "blocks of another size or order can be written, but not read"
            )
        engine.sources = [
            RemoteRank(
                self._peers.load(engine_id, index, rank),
                rank.memory,
                maps_of(mine, (rank.device, self._own.device)),
            )
            for index, rank in enumerate(engine.remote)
            if (mine := lanes.get((index, self._peers.rank))) is not None
        ]
        return engine.sources

    def _holds(self, read: PrefixRead) -> bool:
        return self._boottime() < self._until(read.of.cell)

    def _read(self, read: PrefixRead, source: RemoteRank) -> Transfer:
        there, here = source.blocks[0].descriptors(read.remote_ids, read.local_ids)
        self._stats.add(PREFIX_BYTES, int(here[:, 1].sum()))
        return self._mover.read(source.name, here, there, memory=(self._own.memory, source.memory))

    def _ended(self, reading: _Reading) -> bool:
        """Whether the prefix was read."""
        failure = reading.failure
        if failure == NOT_HELD or (failure is None and not self._holds(reading.read)):
            return False
        if failure is not None:
            why = "attempt %s: prefix read failed, computing it instead: %s"
            logger.warning(why, reading.read.of.attempt, failure)
        self._stats.add(f"{PREFIX_READ}/{'read' if failure is None else 'failed'}")
        return failure is None

    def _fail(self, reading: _Reading, why: Exception) -> None:
        reading.failure = str(why)
        if isinstance(why, TransferError):
            self._peers.failed(reading.read.of.target_engine, why)
