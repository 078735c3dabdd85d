"""The ranks of decode engines that one prefill rank writes into, and what into each."""

from dataclasses import dataclass

import msgspec

from dynamo_lite.protocol.errors import TransferError
from dynamo_lite.protocol.prefill import Part
from dynamo_lite.protocol.records import EngineMetadata, RankMetadata
from dynamo_lite.transfer.base import Mover
from dynamo_lite.transfer.parts import parts_of
from dynamo_lite.transfer.sharding import Lane, join, writers


@dataclass(frozen=True)
class PeerRank:
    """A rank that some of this rank's heads and layers belong to.

    name: the mover's. writers: how many prefill ranks write into it. parts: what
    this one brings of its blocks.
    """

    name: str
    memory: str
    device: int
    lanes: list[Lane]
    parts: list[Part]
    writers: int


class Peers:
    """own: this rank's memory; rank: its index in its engine."""

    def __init__(self, mover: Mover, own: RankMetadata, rank: int):
        self._mover, self._own, self._rank = mover, own, rank
        self._met: dict[str, list[PeerRank]] = {}
        self._known: dict[str, list[str]] = {}

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self._met

    def of(self, engine_id: str) -> list[PeerRank]:
        """Whom to write to; nobody where other ranks bring all. Raises TransferError."""
        found = self._met.get(engine_id)
        if found is None:
            raise TransferError(engine_id, "another write into it has failed")
        return found

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
        names = self._known.setdefault(engine_id, [])
        met: list[PeerRank] = []
        for index, rank in enumerate(remote):
            mine = lanes.get((self._rank, index))
            if mine is None:
                continue
            name = f"{engine_id}/{index}"
            self._mover.add_peer(name, rank.agent)
            if name not in names:
                names.append(name)
            met.append(
                PeerRank(
                    name, rank.memory, rank.device, mine, parts_of(mine), writers(lanes, index)
                )
            )
        self._met[engine_id] = met

    def failed(self, engine_id: str, name: str) -> None:
        """A write into one of the engine's ranks failed: it may be dead, or met again."""
        self._met.pop(engine_id, None)
        if name in self._known.get(engine_id, ()):
            self._known[engine_id].remove(name)
            self._mover.remove_peer(name)

    def forget(self, engine_id: str) -> None:
        """The engine has left, and nothing is written to it any more."""
        self._met.pop(engine_id, None)
        for name in self._known.pop(engine_id, ()):
            self._mover.remove_peer(name)
