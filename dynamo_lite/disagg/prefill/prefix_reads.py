"""Prefixes that a prefill rank reads from a decode engine's blocks.

The decode engine keeps these blocks as they are until this worker has said that
it is done with the attempt, or its lease is gone for long. A reader that stood
still past that may have read what lies there now: so the fence is looked at once
more when all has been read, and what a closed fence lets through is not used.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from dynamo_lite.disagg.counters import PREFIX_BYTES, PREFIX_READ, Counters
from dynamo_lite.disagg.messages import PrefixRead, RankResults
from dynamo_lite.disagg.prefill.remote_ranks import RemoteRanks, Source
from dynamo_lite.protocol.errors import TransferError
from dynamo_lite.protocol.records import RankMetadata
from dynamo_lite.transfer.base import Mover, Transfer

logger = logging.getLogger(__name__)


@dataclass
class _Reading:
    read: PrefixRead
    under_way: list[Transfer] = field(default_factory=list)
    failure: str | None = None


class PrefixReads:
    """own: this rank's memory; peers: whom it knows; alive: the lease's fence."""

    def __init__(
        self,
        mover: Mover,
        own: RankMetadata,
        peers: RemoteRanks,
        alive: Callable[[], bool],
        stats: Counters,
    ):
        self._mover, self._own, self._peers, self._alive = mover, own, peers, alive
        self._stats = stats
        self._readings: list[_Reading] = []
        self._settled = RankResults()

    def __bool__(self) -> bool:
        """Whether anything is being read."""
        return bool(self._readings)

    @property
    def engines(self) -> set[str]:
        """Who is read from."""
        return {reading.read.target_engine for reading in self._readings}

    def start(self, read: PrefixRead) -> None:
        reading = _Reading(read)
        self._readings.append(reading)
        if not self._alive():
            reading.failure = "this worker's lease is not certain"
            return
        try:
            for source in self._peers.sources(read.target_engine):
                reading.under_way.append(self._read(read, source))
        except (TransferError, ValueError, LookupError) as exc:
            self._fail(reading, exc)

    def poll(self) -> None:
        for reading in list(self._readings):
            if reading.under_way and not self._alive():
                # Polling moves the writes of the same agent on, in some transports.
                continue
            still: list[Transfer] = []
            for transfer in reading.under_way:
                try:
                    if not transfer.done():
                        still.append(transfer)
                except TransferError as exc:
                    self._fail(reading, exc)
            reading.under_way = still
            # Blocks of a failed read are free for others only when nothing lands any more.
            if not still:
                self._readings.remove(reading)
                self._settle(reading)

    def take(self) -> RankResults:
        """What has ended since the last call: received, or lost and to be computed."""
        settled, self._settled = self._settled, RankResults()
        return settled

    def _read(self, read: PrefixRead, source: Source) -> Transfer:
        there, here = source.blocks.descriptors(read.remote_ids, read.local_ids)
        self._stats.add(PREFIX_BYTES, int(here[:, 1].sum()))
        return self._mover.read(source.name, here, there, memory=(self._own.memory, source.memory))

    def _settle(self, reading: _Reading) -> None:
        if reading.failure is None and not self._alive():
            reading.failure = "this worker's lease was not certain at its end"
        request_id = reading.read.request_id
        if reading.failure is None:
            self._settled.received.add(request_id)
        else:
            self._settled.lost.add(request_id)
            logger.warning(
                "request %s: attempt %s: its prefix is computed, not read: %s",
                request_id,
                reading.read.attempt,
                reading.failure,
            )
        self._stats.add(f"{PREFIX_READ}/{'read' if reading.failure is None else 'failed'}")

    def _fail(self, reading: _Reading, why: Exception) -> None:
        reading.failure = str(why)
        if isinstance(why, TransferError):
            self._peers.failed(reading.read.target_engine, why.peer)
