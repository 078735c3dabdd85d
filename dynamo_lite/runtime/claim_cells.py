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
    """The cell of one claim, closed until `hold_until`. `ClaimCells` makes it.

    Its calls do nothing when it was freed, or when all cells were closed.
    """

    def __init__(self, cell: Cell, numbers: "memoryview[int]", unused: list[int]):
        self.cell, self._numbers, self._unused = cell, numbers, unused
        # In this order: a reader of a time that was stored after it also reads its claim.
        numbers[cell.index] = 0
        numbers[cell.index + 1] = cell.claim

    def hold_until(self, until: float) -> None:
        """The claim holds until then; a time that has passed closes the cell. Not a duration: a
        process that is stopped before it stores would add the time of the stop."""
        if self._numbers[self.cell.index + 1] == self.cell.claim:
            self._numbers[self.cell.index] = math.floor(until * 1e9)

    def free(self) -> None:
        """Closes the cell, which is used again. Only when nothing of the claim is in flight."""
        if self._numbers[self.cell.index + 1] == self.cell.claim:
            self._numbers[self.cell.index] = self._numbers[self.cell.index + 1] = 0
            self._unused.append(self.cell.index)


class ClaimCells:
    """The component's side.

    claims: how many may be held at a time. path: of the file, which it creates; None: in memory,
    for an engine in the same process.
    """

    def __init__(self, claims: int, path: Path | None = None):
        self.path = path
        size = _NUMBER_BYTES * _PER_CELL * claims
        if path is None:
            mapped = mmap.mmap(-1, size)
        else:
            path.touch(0o600)  # only the holder of a claim knows its id
            path.write_bytes(bytes(size))
            with path.open("r+b") as file:
                mapped = mmap.mmap(file.fileno(), 0)
        #: Each is read and stored at once.
        self._numbers = memoryview(mapped).cast("Q")
        #: Indexes of cells.
        self._unused = list(range(0, _PER_CELL * claims, _PER_CELL))

    def open(self, claim: int) -> OpenCell:
        """claim: its id, above 0, that no other has or had. Raises RuntimeError if as many are open
        as there are cells."""
        if not self._unused:
            raise RuntimeError("more claims than cells for them")
        return OpenCell(Cell(self._unused.pop(), claim), self._numbers, self._unused)

    def close(self) -> None:
        """Closes all cells for good, and removes the file."""
        self._unused.clear()
        for index in range(len(self._numbers)):
            self._numbers[index] = 0
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def read(self, cell: Cell) -> float:
        """See `CellReader.until`."""
        return _until_of(self._numbers, cell)


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
