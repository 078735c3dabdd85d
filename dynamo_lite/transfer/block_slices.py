"""Which bytes of a decode rank's blocks each of its writers writes. Pure.

Writers name these parts in their commits; the rank checks that together they cover its
blocks.
"""

from collections.abc import Iterable, Sequence

from dynamo_lite.protocol.prefill import Part
from dynamo_lite.protocol.records import KvRegion
from dynamo_lite.transfer.sharding import ShardMapping


def parts_of(lanes: Sequence[ShardMapping]) -> list[Part]:
    """The remote bytes of the lanes; equal parts of neighbouring regions are joined."""
    parts: list[Part] = []
    for lane in lanes:
        offset, length = lane.offset, lane.remote.block_bytes
        if parts:
            last = parts[-1]
            if (last.first + last.count, last.offset, last.length) == (lane.index, offset, length):
                parts[-1] = Part(last.first, last.count + 1, offset, length)
                continue
        parts.append(Part(lane.index, 1, offset, length))
    return parts


def hole(regions: Sequence[KvRegion], parts: Iterable[Part]) -> str | None:
    """Returns what the parts miss of the rank's blocks, name twice or have outside of them; None
    if nothing."""
    spans: list[list[tuple[int, int]]] = [[] for _ in regions]
    for part in parts:
        if part.first + part.count > len(regions):
            return f"{part}: there are only {len(regions)} regions"
        for index in range(part.first, part.first + part.count):
            spans[index].append((part.offset, part.offset + part.length))
    for region, brought in zip(regions, spans, strict=True):
        at = 0
        for start, end in sorted(brought):
            if start != at:
                break
            at = end
        else:
            if at == region.block_bytes:
                continue
        return f"layer {region.layer}: bytes {sorted(brought)} of {region.block_bytes}"
    return None
