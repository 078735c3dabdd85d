"""A lease's deadline, shared with the processes that act under it.

The process that holds the lease writes, in eight bytes of a mapped file, until
when the lease certainly lives; whoever must stop acting with it (the engine's
worker half, before every write) reads them. CLOCK_BOOTTIME is one clock for all
processes of a host, and counts the time in which the host was suspended. A holder that
is stopped or partitioned cannot extend the deadline, so it passes: no message is needed
to fence.
"""

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from dynamo_lite.runtime.clock import boottime

_DEADLINE = struct.Struct("<d")


class Fence(Protocol):
    """The lease holder's end."""

    def extend(self, remaining_s: float) -> None:
        """The lease lives at least `remaining_s` from now; 0 fences at once."""
        ...

    def close(self) -> None:
        """Lowers the fence for good."""
        ...


class MemoryFence:
    """Both ends within one process. now: seconds, as `boottime`."""

    def __init__(self, now: Callable[[], float] = boottime):
        self._now = now
        self._deadline = 0.0

    def extend(self, remaining_s: float) -> None:
        self._deadline = self._now() + remaining_s if remaining_s > 0 else 0.0

    def open(self) -> bool:
        return self._now() < self._deadline

    def close(self) -> None:
        self._deadline = 0.0


class FenceHolder:
    """The lease holder's end. Creates the file; `close` lowers the fence for good."""

    def __init__(self, path: Path):
        self.path = path
        path.write_bytes(_DEADLINE.pack(0.0))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _DEADLINE.size)

    def extend(self, remaining_s: float) -> None:
        """The lease lives at least `remaining_s` from now; 0 fences at once."""
        deadline = boottime() + remaining_s if remaining_s > 0 else 0.0
        self._map[:] = _DEADLINE.pack(deadline)

    def close(self) -> None:
        self.extend(0.0)
        self._map.close()
        self.path.unlink(missing_ok=True)


class FenceReader:
    """The acting end."""

    def __init__(self, path: Path):
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), _DEADLINE.size, prot=mmap.PROT_READ)

    def open(self) -> bool:
        """Whether the lease still lives for certain."""
        return boottime() < _DEADLINE.unpack(self._map[:])[0]

    def close(self) -> None:
        self._map.close()
