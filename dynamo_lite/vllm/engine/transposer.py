"""The staging memory of a rank, and the conversion of blocks into it by torch's strided copies."""

from collections.abc import Callable, Sequence

import torch

from dynamo_lite.transfer.transpose import ArrayPlace, Layout, Units

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TorchTransposer:
    """Implements Transposer.

    storages: the rank's KV, all on one device. num_bytes: size of the staging memory. Raises
    RuntimeError if there is not enough memory.
    """

    def __init__(self, storages: Sequence[torch.UntypedStorage], num_bytes: int):
        self._storages = {storage.data_ptr(): storage for storage in storages}
        device = storages[0].device
        self._staging = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def address(self) -> int:
        return self._staging.data_ptr()

    def transpose(self, layout: Layout, units: Units, offset: int) -> Callable[[], bool]:
        """On CUDA it runs on a separate stream, so the engine's next step does not wait for it."""
        if self._stream is None:
            self._copy(layout, units, offset)
            return lambda: True
        event = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            self._copy(layout, units, offset)
            event.record()
        return event.query

    def _copy(self, layout: Layout, units: Units, offset: int) -> None:
        """Copies units of KV into the slot at this offset of the staging memory."""
        device = self._staging.device
        blocks = torch.from_numpy(units.blocks).to(device)
        numbers = torch.from_numpy(units.units).to(device)
        count = (len(units.blocks) + units.padding) // layout.target_units
        most, per_block = int(units.blocks.max()) + 1, layout.local_tokens // layout.unit_tokens
        staging = self._staging.untyped_storage()
        for move in layout.moves:
            base = max(start for start in self._storages if start <= move.source.start)
            start = move.source.start - base
            unit = (move.heads, move.groups, move.items, move.item_bytes // layout.word_bytes)
            shape = (most, per_block, *unit)
            source = _view(self._storages[base], start, move.source, shape, layout.word_bytes)
            found = source[blocks, numbers]
            if units.padding:
                found = torch.cat([found, found.new_zeros((units.padding, *found.shape[1:]))])
            start = offset + move.target.start
            shape = (count, layout.target_units, *shape[2:])
            target = _view(staging, start, move.target, shape, layout.word_bytes)
            target.copy_(found.view(target.shape))


def _view(
    storage: torch.UntypedStorage,
    start: int,
    place: ArrayPlace,
    shape: Sequence[int],
    word_bytes: int,
) -> torch.Tensor:
    """One side of a move as [blocks, units, heads, groups, items, words]. start: in bytes."""
    strides = (place.block, place.unit, place.head, place.group, place.item, word_bytes)
    empty = torch.empty(0, dtype=_WORDS[word_bytes], device=storage.device)
    return empty.set_(
        storage,  # type: ignore[call-overload]
        start // word_bytes,
        tuple(shape),
        tuple(stride // word_bytes for stride in strides),
    )
