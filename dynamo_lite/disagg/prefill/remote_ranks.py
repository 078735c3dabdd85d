"""The ranks of decode engines that one prefill rank writes to or reads from, and which parts."""

import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import msgspec

from dynamo_lite.disagg.messages import PrefillStep
from dynamo_lite.disagg.prefill.staging import Staging
from dynamo_lite.protocol.errors import IncompatiblePeer, TransferError
from dynamo_lite.protocol.prefill import Part
from dynamo_lite.protocol.records import EngineMetadata, RankMetadata
from dynamo_lite.transfer.base import Mover
from dynamo_lite.transfer.block_map import BlockMap, maps_of
from dynamo_lite.transfer.sharding import join, parts_of, writers
from dynamo_lite.transfer.transpose import Layout

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteRank:
    """A decode rank that gets some of this rank's heads and layers, or from which they are read."""

    #: The peer's name at the mover.
    name: str
    memory: str
    #: Where this rank's share of a block lies on both sides, from the source to the target, by KV
    #: group.
    blocks: Mapping[int, BlockMap]
    #: The bytes of its blocks that this rank writes.
    parts: Sequence[Part] = ()
    #: Number of prefill ranks that write to it.
    writers: int = 0


@dataclass
class _Peer:
    """A connected engine. own, remote: this engine's and its ranks."""

    own: Sequence[RankMetadata]
    remote: Sequence[RankMetadata]
    #: The ranks to write to.
    ranks: list[RemoteRank]
    #: Of staged blocks; None if it needs no staging.
    layout: Layout | None
    #: The ranks to read from; None before the first read.
    sources: list[RemoteRank] | None = None


class RemoteRanks:
    """own: this rank's memory. rank: its index in its engine. staging: for peers with other
    blocks."""

    def __init__(self, mover: Mover, own: RankMetadata, rank: int, staging: Staging):
        self._mover, self._own, self._rank, self._staging = mover, own, rank, staging
        #: Engines that failed or are forgotten, until their agents are removed.
        self.ending: set[str] = set()
        #: Why a transfer with an engine failed. The caller reports and clears it.
        self.broken: dict[str, str] = {}
        #: Metadata in msgpack, by engine.
        self._metadata: dict[str, bytes] = {}
        #: Metadata of this rank's own engine in msgpack; empty if it is the only rank.
        self._own_engine = b""
        self._connected: dict[str, _Peer] = {}
        #: Names at the mover, by engine.
        self._names: dict[str, list[str]] = {}

    def of(self, engine_id: str) -> list[RemoteRank]:
        """The ranks to write to; none if other ranks write everything. Raises TransferError."""
        return self._peer(engine_id).ranks

    def layout(self, engine_id: str) -> Layout | None:
        """The layout of staged blocks for this engine; None if it needs no staging."""
        peer = self._connected.get(engine_id)
        return None if peer is None else peer.layout

    def sources(self, engine_id: str) -> list[RemoteRank]:
        """The ranks to read from; together they hold all of this rank's share.

        Raises TransferError, IncompatiblePeer.
        """
        peer = self._peer(engine_id)
        if peer.sources is not None:
            return peer.sources
        lanes = join(engine_id, peer.remote, peer.own)
        if any(lane.staged for mine in lanes.values() for lane in mine):
            raise IncompatiblePeer(
                engine_id, "blocks of another size or order can be written, but not read"
            )
        peer.sources = [
            RemoteRank(
                self._add(engine_id, index, rank),
                rank.memory,
                maps_of(
                    [(lane.local, lane.remote) for lane in mine],
                    (rank.device, self._own.device),
                ),
            )
            for index, rank in enumerate(peer.remote)
            if (mine := lanes.get((index, self._rank))) is not None
        ]
        return peer.sources

    def update(self, step: PrefillStep) -> None:
        """Stores the step's metadata of engines, and drops engines that it forgets."""
        for engine_id in step.forget:
            self._connected.pop(engine_id, None)
            self._metadata.pop(engine_id, None)
            self.ending.add(engine_id)
        # After that: a step may forget an engine and need it again.
        self._metadata |= step.targets
        self._own_engine = step.own or self._own_engine

    def ensure_connected(self, engine_id: str) -> str | None:
        """Connects an engine unless it is connected. Returns why that failed."""
        if engine_id in self._connected:
            return None
        if engine_id in self.ending:
            return "peer not usable: a transfer with it has failed, and others are in flight"
        try:
            self._connected[engine_id] = self._connect(engine_id)
        except (msgspec.DecodeError, TransferError) as exc:
            logger.warning("could not connect to engine %s: %s", engine_id, exc)
            self.broken[engine_id] = str(exc)
            return f"peer not usable: {exc}"
        return None

    def _connect(self, engine_id: str) -> _Peer:
        """Maps this rank's share to the engine's ranks, and loads their agents.

        Raises TransferError, IncompatiblePeer, msgspec.DecodeError.
        """
        remote = _ranks_of(self._metadata[engine_id])
        own = _ranks_of(self._own_engine) if self._own_engine else (self._own,)
        lanes = join(engine_id, own, remote)
        mine = {index: lanes[self._rank, index] for rank, index in lanes if rank == self._rank}
        every = [lane for found in mine.values() for lane in found]
        layout = self._staging.layout(engine_id, every) if every and every[0].staged else None
        ranks: list[RemoteRank] = []
        staged = 0
        for index, found in mine.items():
            rank = remote[index]
            here = [lane.local for lane in found]
            if layout is not None:
                here = layout.regions[staged : staged + len(found)]
                staged += len(found)
            pairs = [(at, lane.remote) for at, lane in zip(here, found, strict=True)]
            ranks.append(
                RemoteRank(
                    name=self._add(engine_id, index, rank),
                    memory=rank.memory,
                    blocks=maps_of(pairs, (self._own.device, rank.device)),
                    parts=parts_of(found),
                    writers=writers(lanes, index),
                )
            )
        return _Peer(own, remote, ranks, layout)

    def _add(self, engine_id: str, index: int, rank: RankMetadata) -> str:
        name = f"{engine_id}/{index}"
        self._mover.add_peer(name, rank.agent)
        names = self._names.setdefault(engine_id, [])
        if name not in names:
            names.append(name)
        return name

    def failed(self, engine_id: str, why: TransferError) -> None:
        """A transfer with a rank of this engine failed: disconnects it, as it may be dead."""
        if self._connected.pop(engine_id, None) is not None:
            self.broken[engine_id] = str(why)
        if why.peer in self._names.get(engine_id, ()):
            self.ending.add(engine_id)

    def remove_ended(self, in_flight: Set[str]) -> None:
        """Removes the agents of ending engines. in_flight: engines with transfers in flight. Their
        agents stay: the transfers would end at once, and still change memory later."""
        for engine_id in self.ending - in_flight:
            for name in self._names.pop(engine_id, ()):
                self._mover.remove_peer(name)
        self.ending &= in_flight

    def _peer(self, engine_id: str) -> _Peer:
        found = self._connected.get(engine_id)
        if found is None:
            raise TransferError(engine_id, "another transfer with it has failed")
        return found


def _ranks_of(metadata: bytes) -> Sequence[RankMetadata]:
    return msgspec.msgpack.decode(metadata, type=EngineMetadata).ranks
