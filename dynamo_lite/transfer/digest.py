"""Checksums of KV blocks, by which a receiver checks what arrived.

The sampled blocks follow from the attempt, so that both sides choose the same ones. The
checksum is CRC-32: it detects accidents, late writes and wrong blocks, but not forgery.
"""

import ctypes
import math
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from dynamo_lite.protocol.records import KvRegion

#: Address and length in bytes.
Span = tuple[int, int]
#: Reads spans of this rank's own KV memory, one after the other, in pieces of any size.
ReadMemory = Callable[[Sequence[Span]], Iterable[bytes]]


def read_dram(spans: Sequence[Span]) -> Iterator[bytes]:
    for address, length in spans:
        yield ctypes.string_at(address, length)


def sample(attempt: str, num_blocks: int, rate: float) -> list[int]:
    """Returns sampled positions in an attempt's list of blocks, in order.

    rate: share of the blocks, 0 to 1; above 0 it is at least one block.
    """
    count = min(num_blocks, math.ceil(num_blocks * rate))
    return sorted(random.Random(attempt).sample(range(num_blocks), count))


def checksum(
    regions: Sequence[KvRegion], block_ids: Sequence[int], read: ReadMemory, value: int = 0
) -> int:
    """Returns the checksum of the blocks' bytes in all regions, block by block.

    value: checksum of the bytes before these.
    """
    spans = [
        (region.base + block * region.stride_bytes, region.block_bytes)
        for block in block_ids
        for region in regions
    ]
    for piece in read(spans):
        value = zlib.crc32(piece, value)
    return value
