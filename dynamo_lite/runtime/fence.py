"""A lease's deadline, shared with the processes that act under it.

The process that holds the lease writes the lease's deadline into a mapped file of eight
bytes. A process that must stop acting when the lease ends (the engine's worker half, before
every write) reads it. The deadline is in CLOCK_BOOTTIME, which is the same for all processes
of a host and counts the time in which the host was suspended. A holder that is stopped or
partitioned cannot extend the deadline, so the fence closes without any message.
"""

import mmap
import struct
from pathlib import Path
from typing import Protocol

from dynamo_lite.runtime.clock import boottime

_DEADLINE = struct.Struct("<d")


class Fence(Protocol):
    """The lease holder's end."""

    def extend(self, remaining_s: float) -> None:
        """Keeps the fence open for `remaining_s` from now; 0 closes it at once."""
        ...

    def close(self) -> None:
        """Closes the fence for good."""
        ...


class FenceHolder:
    """The lease holder's end. Creates the file; `close` closes the fence for good."""

    def __init__(self, path: Path):
        self.path = path
        path.write_bytes(_DEADLINE.pack(0.0))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _DEADLINE.size)

    def extend(self, remaining_s: float) -> None:
        """Keeps the fence open for `remaining_s` from now; 0 closes it at once."""
        deadline = boottime() + remaining_s if remaining_s > 0 else 0.0
        self._map[:] = _DEADLINE.pack(deadline)

    def close(self) -> None:
        self.extend(0.0)
        self._map.close()
        self.path.unlink(missing_ok=True)


class FenceReader:
    """The end of the process that acts under the lease."""

    def __init__(self, path: Path):
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), _DEADLINE.size, prot=mmap.PROT_READ)

    def open(self) -> bool:
        """Whether the lease is certainly still alive."""
        return boottime() < _DEADLINE.unpack(self._map[:])[0]

    def close(self) -> None:
        self._map.close()
