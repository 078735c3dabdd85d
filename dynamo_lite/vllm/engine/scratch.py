"""A rank's scratch memory, on the device of its KV: a link test takes the same path as KV."""

import numpy as np
import torch

from dynamo_lite.protocol.records import Scratch
from dynamo_lite.transfer.base import Mover
from dynamo_lite.transfer.scratch import SLOT_BYTES, SLOTS, HostScratch, ScratchMemory


class DeviceScratch:
    """Scratch memory on a GPU. It uses its own stream, so no call waits for the engine's step."""

    def __init__(self, mover: Mover, device: torch.device):
        self._slots = torch.zeros((SLOTS, SLOT_BYTES), dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)
        address = self._slots.data_ptr()
        mover.register([(address, self._slots.nbytes)], "VRAM", device.index or 0)
        self.region = Scratch(base=address, slots=SLOTS, slot_bytes=SLOT_BYTES)

    def fill(self, slot: int, data: bytes) -> None:
        source = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        with torch.cuda.stream(self._stream):
            self._slots[slot, : len(data)].copy_(source)
        self._stream.synchronize()

    def read(self, slot: int, length: int) -> bytes:
        with torch.cuda.stream(self._stream):
            found = self._slots[slot, :length].cpu()
        self._stream.synchronize()
        return found.numpy().tobytes()


def make_scratch(mover: Mover, device: torch.device) -> ScratchMemory:
    """Makes scratch memory on `device`. Call it before `mover.metadata`."""
    return HostScratch(mover) if device.type == "cpu" else DeviceScratch(mover, device)
