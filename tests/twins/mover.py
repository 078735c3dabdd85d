"""The mover's in-process twin: the same contract by plain memory copies."""

import ctypes
from collections.abc import Collection, Sequence

from dynamo_lite.protocol.errors import TransferError
from dynamo_lite.transfer.block_map import Descriptors
from tests.simulation.engine.mover import REMOVED, Copy, LocalMover, LocalTransfer


class MemoryFabric:
    """The wire between the movers of one process."""

    def __init__(self) -> None:
        self.agents: dict[bytes, MemoryMover] = {}


class MemoryTransfer(LocalTransfer):
    """Applied when it is first polled, as a slow wire would. copies: (from, to, length)."""

    def __init__(self, peer: str, target: "MemoryMover", copies: list[Copy], notice: bytes):
        super().__init__(peer)
        self._target, self._copies, self._notice = target, copies, notice

    def poll(self) -> bool:
        if self._target.closed:
            raise TransferError(self.peer, "the peer is gone")
        self.land()
        if self._notice:
            self._target.inbox.append(self._notice)
        return True

    def land(self) -> None:
        for source, destination, length in self._copies:
            ctypes.memmove(destination, source, length)


class MemoryMover(LocalMover):
    """hold: whether the transfers that it starts stay under way. broken: peers into which a write
    fails. removed: peers. polls: how often it was asked for notices."""

    hold = False
    broken: Collection[str] = ()

    def __init__(self, fabric: MemoryFabric, name: str):
        super().__init__(fabric.agents)
        self._fabric, self._name = fabric, name
        self._spans: list[tuple[int, int]] = []
        self.removed: list[str] = []
        self.polls = 0
        fabric.agents[self.metadata()] = self

    def register(self, spans: Sequence[tuple[int, int]], memory: str, device: int) -> None:
        self._spans += spans

    def metadata(self) -> bytes:
        return self._name.encode()

    def add_peer(self, peer: str, metadata: bytes) -> None:
        if metadata not in self._agents:
            raise TransferError(peer, f"its metadata was not accepted: no agent {metadata!r}")
        super().add_peer(peer, metadata)

    def remove_peer(self, peer: str) -> None:
        self.removed.append(peer)
        super().remove_peer(peer)

    def write(
        self,
        peer: str,
        local: Descriptors,
        remote: Descriptors,
        *,
        memory: tuple[str, str],
        notice: bytes = b"",
    ) -> MemoryTransfer:
        if peer in self.broken:
            raise TransferError(peer, "connection reset")
        target, copies = self.match(peer, local, remote)
        return self._started(MemoryTransfer(peer, target, copies, notice))

    def read(
        self, peer: str, local: Descriptors, remote: Descriptors, *, memory: tuple[str, str]
    ) -> MemoryTransfer:
        target, copies = self.match(peer, local, remote)
        copies = [(there, here, length) for here, there, length in copies]
        return self._started(MemoryTransfer(peer, target, copies, b""))

    def _started(self, transfer: MemoryTransfer) -> MemoryTransfer:
        transfer.held = self.hold
        self.transfers.append(transfer)
        return transfer

    def let_go(self, count: int | None = None) -> None:
        for transfer in [each for each in self.transfers if each.held][:count]:
            transfer.held = False

    def notices(self) -> list[bytes]:
        self.polls += 1
        for transfer in self.transfers:
            if transfer.failure == REMOVED:
                transfer.land()
        return super().notices()

    def close(self) -> None:
        self.closed = True
        if self._agents.get(self.metadata()) is self:
            del self._fabric.agents[self.metadata()]
        self._peers.clear()

    def covers(self, address: int, length: int) -> bool:
        return any(a <= address and address + length <= a + n for a, n in self._spans)
