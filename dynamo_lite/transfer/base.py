"""The mover seam: copy memory of this process into a peer's, or back, and be told.

`nixl.py` is the real one; `memory.py` the in-process twin; `polled.py` adds a thread to
either. All pass `tests/contract/test_mover.py`. Calls are synchronous and do not block:
they are made from an engine's step.
"""

from collections.abc import Sequence
from typing import Protocol

from dynamo_lite.transfer.block_map import Descriptors


class Transfer(Protocol):
    """A write or read under way."""

    def done(self) -> bool:
        """Polls. Raises TransferError when it failed; nothing of it then lands any more,
        of a read at the latest when its peer was removed."""
        ...


class Mover(Protocol):
    """One rank's agent. Not thread-safe: one thread uses it."""

    def register(self, spans: Sequence[tuple[int, int]], memory: str, device: int) -> None:
        """Makes (address, length in bytes) spans of "DRAM" or "VRAM" reachable."""
        ...

    def metadata(self) -> bytes:
        """What a peer needs for `add_peer`; call after `register`."""
        ...

    def add_peer(self, peer: str, metadata: bytes) -> None:
        """Raises TransferError."""
        ...

    def remove_peer(self, peer: str) -> None:
        """Forgets the peer; unknown peers are ignored."""
        ...

    def write(
        self,
        peer: str,
        local: Descriptors,
        remote: Descriptors,
        *,
        memory: tuple[str, str],
        notice: bytes = b"",
    ) -> Transfer:
        """Starts copying `local` to `remote`. Raises TransferError.

        memory: NIXL memory types of the two sides. notice: delivered to the
        peer once this write's data is there; no order holds between writes.
        """
        ...

    def read(
        self, peer: str, local: Descriptors, remote: Descriptors, *, memory: tuple[str, str]
    ) -> Transfer:
        """Starts copying `remote` to `local`. Raises TransferError.

        The peer does not notice, but must go on polling its `notices`.
        """
        ...

    def notices(self) -> list[bytes]:
        """Notices that have arrived since the last call; also drives progress."""
        ...

    def close(self) -> None: ...
