"""The mover's in-process twin: the same contract by plain memory copies."""

import ctypes
from collections.abc import Sequence

from dynamo_lite.protocol.errors import TransferError
from dynamo_lite.transfer.block_map import Descriptors
from tests.simulation.engine.copies import Copy, copies_of


class MemoryFabric:
    """The wire between the movers of one process."""

    def __init__(self) -> None:
        self.agents: dict[str, MemoryMover] = {}


class MemoryTransfer:
    """Applied when it is first polled, as a slow wire would. copies: (from, to, length)."""

    def __init__(self, peer: str, target: "MemoryMover", copies: list[Copy], notice: bytes):
        self._peer, self._target, self._copies, self._notice = peer, target, copies, notice
        self._done = False

    def done(self) -> bool:
        if not self._done:
            if self._target.closed:
                raise TransferError(self._peer, "the peer is gone")
            for source, destination, length in self._copies:
                ctypes.memmove(destination, source, length)
            if self._notice:
                self._target.inbox.append(self._notice)
            self._done = True
        return True


class MemoryMover:
    def __init__(self, fabric: MemoryFabric, name: str):
        self._fabric, self._name = fabric, name
        self._spans: list[tuple[int, int]] = []
        self._peers: dict[str, str] = {}
        self.inbox: list[bytes] = []
        self.closed = False
        fabric.agents[name] = self

    def register(self, spans: Sequence[tuple[int, int]], memory: str, device: int) -> None:
        self._spans += spans

    def metadata(self) -> bytes:
        return self._name.encode()

    def add_peer(self, peer: str, metadata: bytes) -> None:
        name = metadata.decode(errors="replace")
        if name not in self._fabric.agents:
            raise TransferError(peer, f"its metadata was not accepted: no agent {name!r}")
        self._peers[peer] = name

    def remove_peer(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def write(
        self,
        peer: str,
        local: Descriptors,
        remote: Descriptors,
        *,
        memory: tuple[str, str],
        notice: bytes = b"",
    ) -> MemoryTransfer:
        target, copies = self._match(peer, local, remote)
        return MemoryTransfer(peer, target, copies, notice)

    def read(
        self, peer: str, local: Descriptors, remote: Descriptors, *, memory: tuple[str, str]
    ) -> MemoryTransfer:
        target, copies = self._match(peer, local, remote)
        return MemoryTransfer(peer, target, [(there, here, n) for here, there, n in copies], b"")

    def notices(self) -> list[bytes]:
        arrived, self.inbox = self.inbox, []
        return arrived

    def close(self) -> None:
        self.closed = True
        if self._fabric.agents.get(self._name) is self:
            del self._fabric.agents[self._name]
        self._peers.clear()

    def _match(
        self, peer: str, local: Descriptors, remote: Descriptors
    ) -> tuple["MemoryMover", list[Copy]]:
        """The peer, and the copies. Raises TransferError."""
        target = self._fabric.agents.get(self._peers.get(peer, ""))
        if target is None:
            raise TransferError(peer, "no such peer")
        return target, copies_of(peer, local, remote, self._covers, target._covers)

    def _covers(self, address: int, length: int) -> bool:
        return any(a <= address and address + length <= a + n for a, n in self._spans)
