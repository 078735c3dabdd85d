"""Reads a rank's memory for checksums without waiting for the engine's kernels.

On a GPU one kernel per storage and span size gathers all spans of a checksum, and they are
copied to the host together, on a separate stream. The caller knows from an event or a
notification that the data is complete, so the current stream need not be synchronised.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import torch

from dynamo_lite.transfer.digest import ReadMemory, Span, read_dram

#: Bytes that are gathered at a time; needs that much free memory on the device.
GATHER_BYTES = 32 << 20

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def memory_reader(storages: Sequence[torch.UntypedStorage]) -> ReadMemory:
    """Returns a reader of these storages by address. They must be on one device."""
    device = storages[0].device
    if device.type == "cpu":
        return read_dram
    return GatheredReads(storages, torch.cuda.Stream(device))


class GatheredReads:
    """Implements ReadMemory. storages: all on one device. stream: None for the current one."""

    def __init__(
        self,
        storages: Sequence[torch.UntypedStorage],
        stream: "torch.cuda.Stream | None" = None,
        *,
        gather_bytes: int = GATHER_BYTES,
    ):
        self._storages = {storage.data_ptr(): storage for storage in storages}
        self._stream, self._gather_bytes = stream, gather_bytes

    def __call__(self, spans: Sequence[Span]) -> Iterator[bytes]:
        at = 0
        while at < len(spans):
            end, size = at, 0
            while end < len(spans) and (end == at or size + spans[end][1] <= self._gather_bytes):
                size += spans[end][1]
                end += 1
            yield from self._read(spans[at:end])
            at = end

    def _read(self, spans: Sequence[Span]) -> Iterator[bytes]:
        groups: dict[tuple[int, int], list[int]] = {}
        for address, length in spans:
            base = max(start for start in self._storages if start <= address)
            groups.setdefault((base, length), []).append(address)
        try:
            with torch.cuda.stream(self._stream):
                rows = [self._rows(*key, addresses).view(-1) for key, addresses in groups.items()]
                found = (rows[0] if len(rows) == 1 else torch.cat(rows)).cpu().numpy()
        except torch.OutOfMemoryError:
            # One copy per span needs no memory on the device.
            yield from map(self._one, spans)
            return
        # `cpu` has waited for this stream only.
        if len(rows) == 1:
            yield found.tobytes()
            return
        starts = itertools.accumulate((len(row) for row in rows), initial=0)
        where = dict(zip(groups, starts, strict=False))  # start of each group's next row
        for address, length in spans:
            key = max(start for start in self._storages if start <= address), length
            yield found[where[key] : where[key] + length].tobytes()
            where[key] += length

    def _one(self, span: Span) -> bytes:
        address, length = span
        base = max(start for start in self._storages if start <= address)
        storage = self._storages[base]
        with torch.cuda.stream(self._stream):
            row = torch.empty(0, dtype=torch.uint8, device=storage.device)
            row.set_(storage, address - base, (length,), (1,))  # type: ignore[call-overload]
            return row.cpu().numpy().tobytes()

    def _rows(self, base: int, length: int, addresses: Sequence[int]) -> torch.Tensor:
        """Gathers uint8 [addresses, length] from one storage.

        All addresses are on a grid that starts at the first one; its rows may overlap.
        """
        first = min(addresses)
        pitch = math.gcd(*(address - first for address in addresses)) or length
        word = math.gcd(8, length, pitch, first - base)
        storage = self._storages[base]
        shape = (max(address - first for address in addresses) // pitch + 1, length // word)
        grid = torch.empty(0, dtype=_WORDS[word], device=storage.device).set_(
            storage,  # type: ignore[call-overload]
            (first - base) // word,
            shape,
            (pitch // word, 1),
        )
        numbers = torch.tensor([(address - first) // pitch for address in addresses])
        return grid.index_select(0, numbers.to(storage.device)).view(torch.uint8)
