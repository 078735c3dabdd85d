"""Scratch memory: where ways between ranks are tried, apart from all blocks.

A slot is picked by its writer. Two writers in one slot at a time disturb each other's
try, which is then repeated in another slot.
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
        """From the slot's start on. When it returns, the data can be moved."""
        ...

    def read(self, slot: int, length: int) -> bytes: ...


class HostScratch:
    """In this process's DRAM."""

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
    """Bytes that no other text gives."""
    return hashlib.shake_128(text.encode()).digest(length)


def pick_slots(text: str, scratch: Scratch, count: int) -> list[int]:
    """Up to `count` different slots, in an order that follows from `text` alone."""
    return random.Random(text).sample(range(scratch.slots), min(count, scratch.slots))
