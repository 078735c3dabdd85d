"""Scratch memory for link tests, apart from all blocks.

The writer picks a slot. If two writers use one slot at a time, the test is repeated in
another slot.
"""

import hashlib
import random
from typing import Protocol

import numpy as np

from dynamo_lite.protocol.records import Scratch
from dynamo_lite.transfer.base import Mover

SLOTS, SLOT_BYTES = 16, 4096


class ScratchMemory(Protocol):
    """A rank's own scratch memory, registered with its mover. Calls are short."""

    @property
    def region(self) -> Scratch: ...

    def fill(self, slot: int, data: bytes) -> None:
        """Copies data to the start of the slot. After the return it can be transferred."""
        ...

    def read(self, slot: int, length: int) -> bytes: ...


class HostScratch:
    """Scratch memory in this process's DRAM."""

    def __init__(self, mover: Mover):
        self._bytes = np.zeros((SLOTS, SLOT_BYTES), np.uint8)
        address = self._bytes.ctypes.data
        mover.register([(address, self._bytes.nbytes)], "DRAM", 0)
        self.region = Scratch(base=address, slots=SLOTS, slot_bytes=SLOT_BYTES)

    def fill(self, slot: int, data: bytes) -> None:
        self._bytes[slot, : len(data)] = np.frombuffer(data, np.uint8)

    def read(self, slot: int, length: int) -> bytes:
        return self._bytes[slot, :length].tobytes()


def pattern(text: str, length: int) -> bytes:
    """Returns pseudo-random bytes that depend on `text`."""
    return hashlib.shake_128(text.encode()).digest(length)


def pick_slots(text: str, scratch: Scratch, count: int) -> list[int]:
    """Returns up to `count` different slots; they depend only on `text`."""
    return random.Random(text).sample(range(scratch.slots), min(count, scratch.slots))
