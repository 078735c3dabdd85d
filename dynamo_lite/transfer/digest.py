"""Checksums of KV blocks, so that a reader can tell what its writer has sent.

Which blocks are sampled is derived from the attempt, so that a repeated try of
the same attempt checks the same ones. The checksum is CRC-32: it finds accidents,
late writes and wrong blocks, not forgery.
"""

import ctypes
import math
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from dynamo_lite.protocol.records import KvRegion

#: Address and length in bytes.
Span = tuple[int, int]
#: Reads spans of this rank's own KV memory. Their bytes come one span after the other, in
#: pieces of any size.
ReadMemory = Callable[[Sequence[Span]], Iterable[bytes]]


def read_dram(spans: Sequence[Span]) -> Iterator[bytes]:
    for address, length in spans:
        yield ctypes.string_at(address, length)


def sample(attempt: str, num_blocks: int, rate: float) -> list[int]:
    """Positions in an attempt's list of blocks, in order.

    rate: the share that is taken, 0 to 1; above 0 at least one block is.
    """
    count = min(num_blocks, math.ceil(num_blocks * rate))
    return sorted(random.Random(attempt).sample(range(num_blocks), count))


def checksum(
    regions: Sequence[KvRegion], block_ids: Sequence[int], read: ReadMemory, value: int = 0
) -> int:
    """Over what the regions have of each block, block by block, in the regions' order.

    value: the checksum of what comes before.
    """
    spans = [
        (region.base + block * region.stride_bytes, region.block_bytes)
        for block in block_ids
        for region in regions
    ]
    for piece in read(spans):
        value = zlib.crc32(piece, value)
    return value
