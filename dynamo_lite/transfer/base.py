"""The mover seam: copies memory between this process and a peer, with notifications.

`nixl.py` is the real one; `polled.py` adds a thread to a mover; the simulation has an
in-process twin. All pass `tests/contract/test_mover.py`. Calls come from an engine's step:
they are synchronous and do not block.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dynamo_lite.transfer.block_map import Descriptors


class Transfer(Protocol):
    """A write or read."""

    @property
    def over(self) -> bool:
        """Whether it is known to have ended. Does not poll."""
        ...

    def done(self) -> bool:
        """Polls; returns whether it has ended. Raises TransferError if it failed.

        A failed write changes no more memory, unless its peer was removed while it was in flight;
        a failed read none after its peer is removed.
        """
        ...


@dataclass
class PollLimit:
    """Until when the transfers of a mover may be polled, in seconds of CLOCK_BOOTTIME: polling
    moves their data on. Any thread may read it."""

    until: float = math.inf


class Mover(Protocol):
    """One rank's agent. Not thread-safe: one thread uses it."""

    def register(self, spans: Sequence[tuple[int, int]], memory: str, device: int) -> None:
        """Makes (address, length in bytes) spans of "DRAM" or "VRAM" reachable."""
        ...

    def metadata(self) -> bytes:
        """Returns the bytes that a peer needs for `add_peer`; call after `register`."""
        ...

    def add_peer(self, peer: str, metadata: bytes) -> None:
        """Raises TransferError."""
        ...

    def remove_peer(self, peer: str) -> None:
        """Forgets the peer; unknown peers are ignored. Transfers in flight with it fail at once,
        and may still change memory later."""
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

        memory: NIXL memory types of the two sides. notice: a notification for the peer,
        delivered after this write's data has arrived. Writes are not ordered.
        """
        ...

    def read(
        self, peer: str, local: Descriptors, remote: Descriptors, *, memory: tuple[str, str]
    ) -> Transfer:
        """Starts copying `remote` to `local`. Raises TransferError.

        The peer gets no notification, but must keep polling its `notices`.
        """
        ...

    def notices(self) -> list[bytes]:
        """Returns notifications that arrived since the last call; also makes progress."""
        ...

    def close(self) -> None: ...
