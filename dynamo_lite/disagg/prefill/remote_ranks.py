"""The ranks of decode engines that one prefill rank writes into or reads from, and what of each."""

import logging
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import msgspec

from dynamo_lite.disagg.messages import PrefillStep
from dynamo_lite.disagg.prefill.staging import Staging
from dynamo_lite.protocol.errors import IncompatiblePeer, TransferError
from dynamo_lite.protocol.prefill import Part
from dynamo_lite.protocol.records import EngineMetadata, KvRegion, RankMetadata, Scratch
from dynamo_lite.transfer.base import Mover
from dynamo_lite.transfer.block_map import BlockMap
from dynamo_lite.transfer.block_slices import parts_of
from dynamo_lite.transfer.layer_maps import LayerMaps
from dynamo_lite.transfer.sharding import ShardMapping, join, writers
from dynamo_lite.transfer.transpose import Layout

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteRank:
    """A rank that some of this rank's heads and layers belong to.

    name: the mover's. scratch: its scratch memory, on `device`. writers: how many prefill
    ranks write into it. parts: what this one brings of its blocks. blocks: where they lie;
    maps: the same by layer. slot_regions: of a slot at 0, where its blocks are put
    together; empty where they need not be.
    """

    name: str
    memory: str
    device: int
    scratch: Scratch | None
    lanes: list[ShardMapping]
    blocks: BlockMap
    parts: list[Part]
    writers: int
    slot_regions: list[KvRegion]
    maps: LayerMaps


@dataclass(frozen=True)
class Source:
    """A rank that holds some of this rank's heads and layers. blocks: from there to here."""

    name: str
    memory: str
    blocks: BlockMap


class RemoteRanks:
    """own: this rank's memory; rank: its index in its engine; staging: for those whose
    blocks differ."""

    def __init__(self, mover: Mover, own: RankMetadata, rank: int, staging: Staging):
        self._mover, self._own, self._rank, self._staging = mover, own, rank, staging
        self.left: set[str] = set()
        self.unknown: set[str] = set()
        self._told: dict[str, bytes] = {}
        self._siblings = b""
        self._met: dict[str, list[RemoteRank]] = {}
        self._layouts: dict[str, Layout] = {}
        self._known: dict[str, list[str]] = {}
        self._engines: dict[str, tuple[Sequence[RankMetadata], Sequence[RankMetadata]]] = {}
        self._sources: dict[str, list[Source]] = {}

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self._met

    def of(self, engine_id: str) -> list[RemoteRank]:
        """Whom to write to; nobody where other ranks bring all. Raises TransferError."""
        found = self._met.get(engine_id)
        if found is None:
            raise TransferError(engine_id, "another write into it has failed")
        return found

    def layout(self, engine_id: str) -> Layout | None:
        """How blocks for it are put together; None where it takes them as they are."""
        return self._layouts.get(engine_id)

    def sources(self, engine_id: str) -> list[Source]:
        """Whom to read from, so that all of this rank's KV comes. Raises TransferError,
        IncompatiblePeer."""
        found = self._sources.get(engine_id)
        if found is not None:
            return found
        if engine_id not in self._met:
            raise TransferError(engine_id, "it could not be met")
        own, remote = self._engines[engine_id]
        lanes = join(engine_id, remote, own)
        if any(lane.staged for mine in lanes.values() for lane in mine):
            raise IncompatiblePeer(engine_id, "blocks that differ are written, not read")
        found = [
            Source(
                self._add(engine_id, index, rank),
                rank.memory,
                BlockMap(
                    [(lane.local, lane.remote) for lane in mine],
                    (rank.device, self._own.device),
                ),
            )
            for index, rank in enumerate(remote)
            if (mine := lanes.get((index, self._rank))) is not None
        ]
        self._sources[engine_id] = found
        return found

    def hear(self, step: PrefillStep) -> None:
        """Keeps what the step says of engines, so that they can be met, also again."""
        self._told |= step.targets
        self._siblings = step.own or self._siblings
        self.left -= step.targets.keys()
        self.leave(step.forget)

    def greet(self, engine_id: str) -> str | None:
        """Meets an engine, unless it has been met. Returns why that cannot be."""
        if engine_id in self._met:
            return None
        target = self._told.get(engine_id)
        if target is None:
            self.unknown.add(engine_id)
            return "peer not usable: this rank was not told of it"
        try:
            self.meet(engine_id, target, self._siblings)
        except (msgspec.DecodeError, TransferError) as exc:
            logger.warning("engine %s is not usable: %s", engine_id, exc)
            return f"peer not usable: {exc}"
        return None

    def meet(self, engine_id: str, target: bytes, engine: bytes) -> None:
        """First contact: finds out who gets what, and loads the agents.

        target: the decode engine's metadata; engine: of this rank's own engine, empty
        if it is the only rank. Raises TransferError, IncompatiblePeer,
        msgspec.DecodeError.
        """
        remote = msgspec.msgpack.decode(target, type=EngineMetadata).ranks
        own = (self._own,)
        if engine:
            own = msgspec.msgpack.decode(engine, type=EngineMetadata).ranks
        lanes = join(engine_id, own, remote)
        mine = {index: lanes[self._rank, index] for rank, index in lanes if rank == self._rank}
        every = [lane for found in mine.values() for lane in found]
        layout = self._staging.layout(engine_id, every) if every and every[0].staged else None
        met: list[RemoteRank] = []
        for index, found in mine.items():
            rank = remote[index]
            devices, slot = (self._own.device, rank.device), []
            if layout is not None:
                begin = sum(len(peer.lanes) for peer in met)
                slot = layout.regions[begin : begin + len(found)]
            pairs = [(lane.local, lane.remote) for lane in found]
            if slot:
                pairs = [(at, lane.remote) for at, lane in zip(slot, found, strict=True)]
            met.append(
                RemoteRank(
                    name=self._add(engine_id, index, rank),
                    memory=rank.memory,
                    device=rank.device,
                    scratch=rank.scratch,
                    lanes=found,
                    blocks=BlockMap(pairs, devices),
                    parts=parts_of(found),
                    writers=writers(lanes, index),
                    slot_regions=slot,
                    maps=LayerMaps(found, devices),
                )
            )
        self._met[engine_id] = met
        self._engines[engine_id] = own, remote
        if layout is not None:
            self._layouts[engine_id] = layout

    def _add(self, engine_id: str, index: int, rank: RankMetadata) -> str:
        name = f"{engine_id}/{index}"
        self._mover.add_peer(name, rank.agent)
        names = self._known.setdefault(engine_id, [])
        if name not in names:
            names.append(name)
        return name

    def failed(self, engine_id: str, name: str) -> None:
        """A transfer with one of the engine's ranks failed: it may be dead, or met again."""
        self._unmeet(engine_id)
        if name in self._known.get(engine_id, ()):
            self._known[engine_id].remove(name)
            self._mover.remove_peer(name)

    def leave(self, engines: Iterable[str]) -> None:
        """They have left, and are forgotten when nothing goes to or comes from them."""
        self.left.update(engines)

    def forget_left(self, in_use: Set[str]) -> None:
        for engine_id in self.left - in_use:
            self.forget(engine_id)
        self.left &= in_use

    def forget(self, engine_id: str) -> None:
        """The engine has left, and nothing goes to or comes from it any more."""
        self._unmeet(engine_id)
        self._told.pop(engine_id, None)
        for name in self._known.pop(engine_id, ()):
            self._mover.remove_peer(name)

    def _unmeet(self, engine_id: str) -> None:
        self._met.pop(engine_id, None)
        self._layouts.pop(engine_id, None)
        self._engines.pop(engine_id, None)
        self._sources.pop(engine_id, None)
