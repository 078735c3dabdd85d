"""The ranks of decode engines that one prefill rank writes to or reads from, and which parts."""

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import msgspec

from dynamo_lite.disagg.messages import PrefillStep
from dynamo_lite.disagg.prefill.staging import Staging
from dynamo_lite.protocol.errors import TransferError
from dynamo_lite.protocol.prefill import Part
from dynamo_lite.protocol.records import EngineMetadata, RankMetadata
from dynamo_lite.transfer.base import Mover
from dynamo_lite.transfer.block_map import BlockMap, maps_of
from dynamo_lite.transfer.sharding import join, parts_of
from dynamo_lite.transfer.transpose import Layout

logger = logging.getLogger(__name__)

#: How many decode engines stay connected: those used last, and all that are in use.
_MOST_ENGINES = 64


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
class ConnectedEngine:
    """A decode engine. own: the ranks of this prefill engine. remote: of the decode engine."""

    own: Sequence[RankMetadata]
    remote: Sequence[RankMetadata]
    #: The ranks to write to; none if other ranks write everything.
    ranks: list[RemoteRank]
    #: Of staged blocks; None if it needs no staging.
    layout: Layout | None
    #: The ranks to read from; None before the first read.
    sources: list[RemoteRank] | None = None


class RemoteRanks:
    """own: this rank's memory. rank: its index in its engine. staging: for peers with other
    blocks."""

    def __init__(self, mover: Mover, own: RankMetadata, rank: int, staging: Staging):
        self._mover, self._own, self.rank, self._staging = mover, own, rank, staging
        #: Engines that failed, or lost their place to others, until their agents are removed.
        self.ending: set[str] = set()
        #: Why an engine could not be connected, or a transfer with it failed. The caller reports
        #: and clears it.
        self.broken: dict[str, str] = {}
        #: In the order of their use.
        self._connected: dict[str, ConnectedEngine] = {}
        #: Names at the mover, by engine.
        self._names: dict[str, set[str]] = {}

    def of(self, engine_id: str) -> ConnectedEngine:
        """Raises TransferError if it is not connected."""
        found = self._connected.get(engine_id)
        if found is None:
            why = self.broken.get(engine_id, "another transfer with it has failed")
            raise TransferError(engine_id, f"not usable: {why}")
        return found

    def meet(self, step: PrefillStep, in_use: Callable[[], Set[str]]) -> None:
        """Connects the engines of the jobs that begin to read or write in this step. Of too many
        it drops those that were used longest ago. in_use: returns those that must stay."""
        for engine_id in [each for each in step.targets if each not in self.ending]:
            try:
                found = self._connected.pop(engine_id, None) or self._connect(engine_id, step)
            except (msgspec.DecodeError, TransferError) as exc:
                logger.warning("could not connect to engine %s: %s", engine_id, exc)
                self.broken[engine_id] = _why(exc)
                self.ending.add(engine_id)
            else:
                self._connected[engine_id] = found
        if (excess := len(self._connected) - _MOST_ENGINES) > 0:
            stay = in_use() | step.targets.keys()
            for engine_id in [each for each in self._connected if each not in stay][:excess]:
                del self._connected[engine_id]
                self.ending.add(engine_id)

    def _connect(self, engine_id: str, step: PrefillStep) -> ConnectedEngine:
        """Maps this rank's share to the engine's ranks, and loads their agents.

        Raises TransferError, IncompatiblePeer, msgspec.DecodeError.
        """
        remote = _ranks_of(step.targets[engine_id])
        own = _ranks_of(step.own) if step.own else (self._own,)
        lanes = join(engine_id, own, remote)
        mine = {index: lanes[self.rank, index] for rank, index in lanes if rank == self.rank}
        every = [lane for found in mine.values() for lane in found]
        layout = self._staging.layout(engine_id, every) if every and every[0].staged else None
        places = iter([lane.local for lane in every] if layout is None else layout.regions)
        ranks = [
            RemoteRank(
                name=self.load(engine_id, index, remote[index]),
                memory=remote[index].memory,
                blocks=maps_of(
                    [replace(lane, local=next(places)) for lane in found],
                    (self._own.device, remote[index].device),
                ),
                parts=parts_of(found),
                writers=sum(target == index for _, target in lanes),
            )
            for index, found in mine.items()
        ]
        return ConnectedEngine(own, remote, ranks, layout)

    def load(self, engine_id: str, index: int, rank: RankMetadata) -> str:
        """Loads the agent of one rank; returns its name at the mover. Raises TransferError."""
        name = f"{engine_id}/{index}"
        self._mover.add_peer(name, rank.agent)
        self._names.setdefault(engine_id, set()).add(name)
        return name

    def failed(self, engine_id: str, why: TransferError) -> None:
        """A transfer with a rank of this engine failed: disconnects it, as it may be dead."""
        if self._connected.pop(engine_id, None) is not None:
            self.broken[engine_id] = _why(why)
            self.ending.add(engine_id)
        elif why.peer in self._names.get(engine_id, ()):
            self.ending.add(engine_id)

    def remove_ended(self, in_flight: Set[str]) -> None:
        """Removes the agents of ending engines. in_flight: engines with transfers in flight. Their
        agents stay: the transfers would end at once, and still change memory later."""
        for engine_id in self.ending - in_flight:
            for name in sorted(self._names.pop(engine_id, ())):
                self._mover.remove_peer(name)
        self.ending &= in_flight


def _why(error: Exception) -> str:
    """For a message that names the engine itself."""
    return f"{error.peer}: {error.detail}" if isinstance(error, TransferError) else str(error)


def _ranks_of(metadata: bytes) -> Sequence[RankMetadata]:
    return msgspec.msgpack.decode(metadata, type=EngineMetadata).ranks
