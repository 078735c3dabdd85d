"""A mover whose notifications are authenticated with the graph's secret."""

from collections.abc import Sequence

from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.runtime.secret import GraphSecret
from dynamo_lite.transfer.base import Mover, Transfer
from dynamo_lite.transfer.block_map import Descriptors

_CONTEXT = b"notification"


class AuthenticatedMover:
    """Implements Mover on another one. A notification that is not authentic arrives empty.

    The data itself is not authenticated, because UCX does not support that.
    """

    def __init__(self, mover: Mover, secret: GraphSecret):
        self._mover, self._secret = mover, secret

    def register(self, spans: Sequence[tuple[int, int]], memory: str, device: int) -> None:
        self._mover.register(spans, memory, device)

    def metadata(self) -> bytes:
        return self._mover.metadata()

    def add_peer(self, peer: str, metadata: bytes) -> None:
        self._mover.add_peer(peer, metadata)

    def remove_peer(self, peer: str) -> None:
        self._mover.remove_peer(peer)

    def write(
        self,
        peer: str,
        local: Descriptors,
        remote: Descriptors,
        *,
        memory: tuple[str, str],
        notice: bytes = b"",
    ) -> Transfer:
        if notice:
            notice = self._secret.protect(_CONTEXT, notice)
        return self._mover.write(peer, local, remote, memory=memory, notice=notice)

    def read(
        self, peer: str, local: Descriptors, remote: Descriptors, *, memory: tuple[str, str]
    ) -> Transfer:
        return self._mover.read(peer, local, remote, memory=memory)

    def notices(self) -> list[bytes]:
        return [self._opened(notice) for notice in self._mover.notices()]

    def close(self) -> None:
        self._mover.close()

    def _opened(self, notice: bytes) -> bytes:
        try:
            return self._secret.open(_CONTEXT, notice)
        except ProtocolError:
            return b""
