"""Staging memory, where a prefill rank converts blocks for peers with other blocks.

The memory is allocated when the first such peer is connected, a fixed number of slots. A
write without a free slot waits in its queue until another write has ended, so a slow network
limits the copying. Once its slot is filled, a write does not read the blocks any more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from dynamo_lite.disagg.messages import BlockWrite
from dynamo_lite.protocol.errors import IncompatiblePeer, TransferError
from dynamo_lite.protocol.records import RankMetadata
from dynamo_lite.transfer.base import Mover
from dynamo_lite.transfer.block_map import ShardMapping
from dynamo_lite.transfer.transpose import Layout, Units, slot_layout, units_of

#: One slot is filled while others are written. More slots would only help with more peers at once.
SLOTS = 4
#: Some thousand tokens of one rank's share of a large model: for a write of this size the
#: transfer takes far longer than its start.
SLOT_BYTES = 32 << 20


class Transposer(Protocol):
    """A rank's staging memory; copies KV into it (`vllm/engine/transposer.py`)."""

    @property
    def address(self) -> int:
        """Address of the first byte."""
        ...

    def transpose(self, layout: Layout, units: Units, offset: int) -> Callable[[], bool]:
        """Starts to fill the slot at `offset`. Returns a check whether it is filled."""
        ...


#: Makes one with this many bytes. Raises RuntimeError if there is not enough memory.
OpenTransposer = Callable[[int], Transposer]


@dataclass
class StagingSlot:
    """A slot in use."""

    #: Address of its first byte.
    address: int
    #: Whether the blocks are in it.
    filled: Callable[[], bool]
    #: References: the queue's, and one for each write in flight.
    users: int = 1


class Staging:
    """own: the rank's memory. open_transposer: None if this rank does not support staging."""

    def __init__(
        self,
        mover: Mover,
        own: RankMetadata,
        open_transposer: OpenTransposer | None,
        *,
        slots: int = SLOTS,
        slot_bytes: int = SLOT_BYTES,
    ):
        self._mover, self._own, self._open = mover, own, open_transposer
        self._slots, self._slot_bytes = slots, slot_bytes
        self._transposer: Transposer | None = None
        self._free: list[int] = []

    def layout(self, peer: str, lanes: Sequence[ShardMapping]) -> Layout:
        """Returns the layout of a slot with blocks for all ranks of the peer in `lanes`.

        Allocates the memory on the first call. Raises IncompatiblePeer, TransferError.
        """
        if self._open is None:
            raise IncompatiblePeer(
                peer, "its blocks differ in size or order, and this rank has no staging memory"
            )
        try:
            layout = slot_layout(lanes, self._slot_bytes)
        except ValueError as exc:
            raise IncompatiblePeer(peer, f"its blocks cannot be staged: {exc}") from exc
        if self._transposer is None:
            self._allocate(peer, self._open)
        return layout

    def _allocate(self, peer: str, open_transposer: OpenTransposer) -> None:
        size = self._slots * self._slot_bytes
        try:
            transposer = open_transposer(size)
        except RuntimeError as exc:
            raise TransferError(peer, f"no memory for {size} bytes of staging: {exc}") from exc
        first = transposer.address
        try:
            self._mover.register([(first, size)], self._own.memory, self._own.device)
        except Exception as exc:
            # NIXL has many errors. The caller is an engine's step: only this peer's link fails,
            # and the next job for such a peer tries again with new memory.
            why = f"{size} bytes of staging could not be registered: {exc}"
            raise TransferError(peer, why) from exc
        self._transposer = transposer
        self._free = [first + slot * self._slot_bytes for slot in range(self._slots)]

    def fill(self, layout: Layout, write: BlockWrite) -> StagingSlot | None:
        """Starts to convert the write's blocks into a slot; None while no slot is free.

        Raises ValueError if the write's blocks do not match the layout, TransferError.
        """
        if not self._free or self._transposer is None:
            return None
        units = units_of(layout, write.local_ids, write.skip_tokens, len(write.remote_ids))
        address = self._free.pop()
        offset = address - self._transposer.address
        try:
            return StagingSlot(address, self._transposer.transpose(layout, units, offset))
        except Exception as exc:
            # An error of the device must not end the engine's step.
            self._free.append(address)
            raise TransferError(write.of.target_engine, f"could not stage blocks: {exc}") from exc

    def release(self, slot: StagingSlot) -> None:
        """Drops one reference; the slot is free after the last one."""
        slot.users -= 1
        if not slot.users:
            self._free.append(slot.address)


def split(write: BlockWrite, layout: Layout) -> list[BlockWrite]:
    """Splits the write into parts that fit into a slot each."""
    size, own_size = layout.target_tokens, layout.local_tokens
    parts: list[BlockWrite] = []
    for start in range(0, max(len(write.remote_ids), 1), layout.capacity):
        end = min(start + layout.capacity, len(write.remote_ids))
        at = write.skip_tokens + start * size
        behind = -(-(write.skip_tokens + end * size) // own_size)
        parts.append(
            replace(
                write,
                local_ids=write.local_ids[at // own_size : behind],
                remote_ids=write.remote_ids[start:end],
                last=write.last and end == len(write.remote_ids),
                first=write.first + start,
                skip_tokens=at % own_size,
            )
        )
    return parts
