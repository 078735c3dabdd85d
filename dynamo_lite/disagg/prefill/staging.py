"""Where a prefill rank puts blocks together for peers whose blocks differ from its own.

Memory is taken when the first such peer is met, and never more than the slots: a write
that finds none free waits in its queue until another write has ended, and so a slow wire
holds back the copying. Once its bytes are in a slot, a write reads no blocks any more.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from dynamo_lite.disagg.messages import BlockWrite
from dynamo_lite.protocol.errors import IncompatiblePeer, TransferError
from dynamo_lite.protocol.records import RankMetadata
from dynamo_lite.transfer.base import Mover
from dynamo_lite.transfer.digest import Span
from dynamo_lite.transfer.sharding import ShardMapping
from dynamo_lite.transfer.transpose import Layout, Units, slot_layout, units_of

#: One is filled while others are on their way; more would only serve more peers at once.
SLOTS = 4
#: Some thousand tokens of one rank's share of a large model: a write of that size takes
#: as long as its bytes take, and its start does not count.
SLOT_BYTES = 32 << 20


class Transposer(Protocol):
    """A rank's staging memory, and what copies its KV into that (`vllm/engine/transposer.py`)."""

    @property
    def address(self) -> int:
        """Of the first byte."""
        ...

    def transpose(self, layout: Layout, units: Units, offset: int) -> Callable[[], bool]:
        """Starts to fill the slot at `offset`. Returns what says whether it is filled."""
        ...

    def read(self, spans: Sequence[Span]) -> Iterable[bytes]:
        """Of the staging memory; see `ReadMemory`."""
        ...


#: Makes one with so many bytes. Raises RuntimeError where there is no memory for them.
OpenTransposer = Callable[[int], Transposer]


@dataclass
class Slot:
    """address: of its first byte. filled: whether it holds its blocks. users: who has not
    let go of it."""

    address: int
    filled: Callable[[], bool]
    users: int = 1


class Staging:
    """own: the rank's memory; open_transposer: None where nothing can be staged."""

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
        """Of a slot with blocks for all of the peer's ranks that these lanes lead to.

        Takes the memory if nobody has. Raises IncompatiblePeer, TransferError.
        """
        if self._open is None:
            raise IncompatiblePeer(peer, "its blocks differ, and nothing can be staged here")
        try:
            layout = slot_layout(lanes, self._slot_bytes)
        except ValueError as exc:
            raise IncompatiblePeer(peer, f"its blocks cannot be staged: {exc}") from exc
        if self._transposer is None:
            size = self._slots * self._slot_bytes
            try:
                self._transposer = self._open(size)
            except RuntimeError as exc:
                raise TransferError(peer, f"no {size} bytes to stage its blocks: {exc}") from exc
            first = self._transposer.address
            self._mover.register([(first, size)], self._own.memory, self._own.device)
            self._free = [first + slot * self._slot_bytes for slot in range(self._slots)]
        return layout

    def fill(self, layout: Layout, write: BlockWrite) -> Slot | None:
        """Starts to put the write's blocks together; None while no slot is free.

        Raises ValueError when the write's blocks do not match, TransferError.
        """
        if not self._free or self._transposer is None:
            return None
        units = units_of(layout, write.local_ids, write.skip_tokens, len(write.remote_ids))
        address = self._free.pop()
        offset = address - self._transposer.address
        try:
            return Slot(address, self._transposer.transpose(layout, units, offset))
        except Exception as exc:
            # A kernel that does not compile, or a device's error, must not end the engine's step.
            self._free.append(address)
            raise TransferError(write.target_engine, f"blocks not put together: {exc}") from exc

    def let_go(self, slot: Slot | None) -> None:
        """One user less; without any, the slot is free."""
        if slot is not None:
            slot.users -= 1
            if not slot.users:
                self._free.append(slot.address)

    def read(self, spans: Sequence[Span]) -> Iterable[bytes]:
        assert self._transposer is not None
        return self._transposer.read(spans)


def split(write: BlockWrite, layout: Layout) -> list[BlockWrite]:
    """The write in parts that fit into a slot each."""
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
