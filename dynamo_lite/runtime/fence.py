"""A lease's deadline, shared with the processes that act under it, and permits for their work.

The process that holds the lease writes the lease's deadline into the first eight bytes of a
mapped file. A process that must stop acting when the lease ends (the engine's worker half,
before every write) reads it. The deadline is in CLOCK_BOOTTIME, which is the same for all processes
of a host and counts the time in which the host was suspended. A holder that is stopped or
partitioned cannot extend the deadline, so the fence closes without any message. Behind the
deadline lie the cells of the permits (`permits.py`), eight bytes each, two for each permit.
"""

import mmap
import struct
from pathlib import Path
from typing import Protocol

from dynamo_lite.runtime.clock import boottime
from dynamo_lite.runtime.permits import (
    CELLS_OF_PERMIT,
    Permit,
    Permits,
    PermitVerdict,
    grant_of,
    verdict,
)

_DEADLINE = struct.Struct("<d")
_CELL = 8


class Fence(Protocol):
    """The lease holder's end."""

    @property
    def permits(self) -> Permits: ...

    def open_until(self, deadline: float) -> None:
        """deadline: a time of CLOCK_BOOTTIME; 0, or a time that has passed, closes the fence at
        once. Not a duration: a process that is stopped before it writes would add the time of the
        stop to it."""
        ...

    def close(self) -> None:
        """Closes the fence for good."""
        ...


class FenceHolder:
    """The lease holder's end. Creates the file; `close` closes the fence for good.

    permits: how many may be open at a time.
    """

    def __init__(self, path: Path, permits: int = 1):
        self.path = path
        path.write_bytes(_DEADLINE.pack(0.0) + bytes(_CELL * CELLS_OF_PERMIT * permits))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._cells = memoryview(self._map)[_DEADLINE.size :].cast("Q")
        self.permits = Permits(self._cells)

    def open_until(self, deadline: float) -> None:
        """See `Fence.open_until`."""
        self._map[: _DEADLINE.size] = _DEADLINE.pack(deadline)

    def close(self) -> None:
        self.open_until(0.0)
        self.permits.close()
        self._cells.release()
        self._map.close()
        self.path.unlink(missing_ok=True)


class FenceReader:
    """The end of the process that acts under the lease."""

    def __init__(self, path: Path):
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self._cells = memoryview(self._map)[_DEADLINE.size :].cast("Q")

    def open(self) -> bool:
        """Whether the lease is certainly still alive."""
        return boottime() < _DEADLINE.unpack(self._map[: _DEADLINE.size])[0]

    def verdict(self, permit: Permit) -> PermitVerdict:
        return verdict(self._cells, permit)

    def grant_of(self, permit: Permit) -> int:
        return grant_of(self._cells, permit)

    def close(self) -> None:
        self._cells.release()
        self._map.close()
