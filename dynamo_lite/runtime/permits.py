"""Permits: whether work that has begun may have effects outside its process.

A component starts an engine on a job while it still waits for the claim of the job, and says
later whether the claim was granted. It does so in shared memory, which the engine's processes
read before every write, as they read the fence: no message has to reach them in time, and none
can be lost. A permit that is not open any more is refused. Beside the verdict lies the id of the
grant under which the work's effects count.
"""

import enum
from typing import Protocol

import msgspec

#: The verdict, and the id of the grant.
CELLS_OF_PERMIT = 2


class Cells(Protocol):
    """64-bit numbers, each of which is read and stored at once."""

    def __len__(self) -> int: ...

    def __getitem__(self, cell: int, /) -> int: ...

    def __setitem__(self, cell: int, value: int, /) -> None: ...


class Permit(msgspec.Struct, frozen=True):
    """Names the cell with the verdict. The default names no cell, and is refused."""

    #: Index of the verdict.
    cell: int = 0
    #: Counts all permits of one table. A cell is used again, a number is not.
    number: int = 0


class PermitVerdict(enum.Enum):
    #: Not decided yet.
    PENDING = "pending"
    GRANTED = "granted"
    REFUSED = "refused"


class OpenPermit:
    """A permit on the side that decides, pending until `grant` or `refuse`. `Permits` makes it."""

    def __init__(self, permit: Permit, owner: "Permits"):
        self.permit, self._owner = permit, owner
        self._closed = False
        self._set(0, at=1)
        self._set(_pending(permit.number))

    def grant(self, grant: int) -> None:
        """grant: id, above 0. A rank that sees the verdict before the id takes it for pending."""
        self._set(grant, at=1)
        self._set(_granted(self.permit.number))

    def refuse(self) -> None:
        self._set(0)

    def close(self) -> None:
        """The permit is refused from now on, even if it was granted. Its cell is used again."""
        if not self._closed:
            self.refuse()
            self._closed = True
            self._owner.free(self.permit.cell)

    def _set(self, value: int, at: int = 0) -> None:
        if not self._closed:
            self._owner.store(self.permit.cell + at, value)


class Permits:
    """The side that decides. cells: `CELLS_OF_PERMIT` per permit that is open at a time."""

    def __init__(self, cells: Cells):
        self._cells: Cells | None = cells
        self._free = list(range(0, len(cells), CELLS_OF_PERMIT))
        self._number = 0

    def open(self) -> OpenPermit:
        """Raises RuntimeError if as many permits are open as there are cells."""
        if not self._free:
            raise RuntimeError("more permits than cells for them")
        self._number += 1
        return OpenPermit(Permit(self._free.pop(), self._number), self)

    def close(self) -> None:
        """Refuses all permits; the cells are not used any more."""
        for cell in range(len(self._cells or ())):
            self.store(cell, 0)
        self._cells = None

    def store(self, cell: int, value: int) -> None:
        """For `OpenPermit`."""
        if self._cells is not None:
            self._cells[cell] = value

    def free(self, cell: int) -> None:
        """For `OpenPermit`."""
        self._free.append(cell)


def verdict(cells: Cells, permit: Permit) -> PermitVerdict:
    """Reads the verdict; the side that asks calls it."""
    if permit.number == 0 or permit.cell >= len(cells):
        return PermitVerdict.REFUSED
    found = cells[permit.cell]
    if found == _granted(permit.number):
        return PermitVerdict.GRANTED if cells[permit.cell + 1] else PermitVerdict.PENDING
    return PermitVerdict.PENDING if found == _pending(permit.number) else PermitVerdict.REFUSED


def grant_of(cells: Cells, permit: Permit) -> int:
    """The id of the grant of a permit whose verdict is granted."""
    return cells[permit.cell + 1]


def always_granted(_permit: Permit) -> PermitVerdict:
    """A verdict for ranks that get only jobs with a granted claim."""
    return PermitVerdict.GRANTED


def no_grant(_permit: Permit) -> int:
    """A grant id for the same ranks, which do not check grants."""
    return 0


def _pending(number: int) -> int:
    return 2 * number


def _granted(number: int) -> int:
    """Differs from pending in one bit, so a read during the change sees one of the two."""
    return 2 * number + 1
