"""Until when the ranks of a prefill engine may start writes and reads, one cell per claim.

The component holds the claims. It stores until when each one holds in a mapped file, which the
engine's ranks read before every write and read: no message has to reach them in time, and none can
be lost. A component that is stopped, dead or cut off renews nothing, so its engine stops by itself.

Times are of CLOCK_BOOTTIME, which is the same for all processes of a host, and counts the time in
which the host was suspended.
"""

import math
import mmap
from collections.abc import Callable
from pathlib import Path

import msgspec

#: Numbers of eight bytes: until when, in nanoseconds, and the claim.
_PER_CELL = 2
_NUMBER_BYTES = 8


class Cell(msgspec.Struct, frozen=True):
    """Names the cell of a claim. The default is never open."""

    index: int = 0
    #: Id of the claim. A cell is used again, for other claims.
    claim: int = 0


class OpenCell:
    """The cell of one claim, closed until `hold_until`. `ClaimCells` makes it."""

    def __init__(self, cell: Cell, owner: "ClaimCells"):
        self.cell, self._owner = cell, owner
        self._freed = False
        # In this order: a reader of a time that was stored after it also reads its claim.
        self._store(0)
        owner.store(cell.index + 1, cell.claim)

    def hold_until(self, until: float) -> None:
        """The claim holds until then; a time that has passed closes the cell. Not a duration: a
        process that is stopped before it stores would add the time of the stop."""
        self._store(math.floor(until * 1e9))

    def free(self) -> None:
        """Closes the cell, which is used again. Only when nothing of the claim is in flight."""
        if not self._freed:
            self._store(0)
            self._freed = True
            self._owner.give_back(self.cell.index)

    def _store(self, value: int) -> None:
        if not self._freed:
            self._owner.store(self.cell.index, value)


class ClaimCells:
    """The component's side.

    claims: how many may be held at a time. path: of the file, which it creates; None: in memory,
    for an engine in the same process.
    """

    def __init__(self, claims: int, path: Path | None = None):
        self.path = path
        size = _NUMBER_BYTES * _PER_CELL * claims
        if path is None:
            self._map = mmap.mmap(-1, size)
        else:
            path.touch(0o600)  # only the holder of a claim knows its id
            path.write_bytes(bytes(size))
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)
        #: Each is read and stored at once.
        self._numbers = memoryview(self._map).cast("Q")
        self._free = list(range(0, _PER_CELL * claims, _PER_CELL))
        self._closed = False

    def open(self, claim: int) -> OpenCell:
        """claim: its id, above 0. Raises RuntimeError if as many are open as there are cells."""
        if not self._free:
            raise RuntimeError("more claims than cells for them")
        return OpenCell(Cell(self._free.pop(), claim), self)

    def close(self) -> None:
        """Closes all cells for good, and removes the file."""
        if self._closed:
            return
        for index in range(len(self._numbers)):
            self.store(index, 0)
        self._closed = True
        self._numbers.release()
        self._map.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def read(self, cell: Cell) -> float:
        """See `CellReader.until`."""
        return 0.0 if self._closed else _until_of(self._numbers, cell)

    def store(self, index: int, value: int) -> None:
        """For `OpenCell`."""
        if not self._closed:
            self._numbers[index] = value

    def give_back(self, index: int) -> None:
        """For `OpenCell`."""
        self._free.append(index)


class CellReader:
    """The side of an engine's process."""

    def __init__(self, path: Path):
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self._numbers = memoryview(self._map).cast("Q")

    def until(self, cell: Cell) -> float:
        """Until when the claim of this cell holds, in seconds of CLOCK_BOOTTIME; 0: it does not."""
        return _until_of(self._numbers, cell)

    def close(self) -> None:
        self._numbers.release()
        self._map.close()


#: Returns until when a claim holds; see `CellReader.until`.
Until = Callable[[Cell], float]


def _until_of(numbers: "memoryview[int]", cell: Cell) -> float:
    if cell.claim == 0 or cell.index + 1 >= len(numbers):
        return 0.0
    until = numbers[cell.index]  # before the claim, see `OpenCell`
    return until / 1e9 if numbers[cell.index + 1] == cell.claim else 0.0
