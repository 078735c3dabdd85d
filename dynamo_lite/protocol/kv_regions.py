"""The regions of an engine's record: their KV heads, and the checks that a type cannot express."""

from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.records import LIMIT, EngineMetadata, KvArray, KvRegion, RankMetadata


def heads_of(region: KvRegion) -> range:
    """The KV heads in each block of the region; a block that cannot be cut counts as one."""
    head_bytes = bytes_of_head(region) if region.arrays else region.head_bytes
    count = region.block_bytes // head_bytes if head_bytes else 1
    return range(region.first_head, region.first_head + count)


def bytes_of_head(region: KvRegion) -> int:
    """Bytes of one head in a block with known arrays."""
    return sum(
        region.tokens // array.group_tokens * array.items * array.item_bytes
        for array in region.arrays
    )


def decode_engine(data: bytes) -> EngineMetadata:
    """Raises ProtocolError when the record is malformed, or its memory layout is impossible."""
    metadata = decode_json(data, EngineMetadata)
    for rank in metadata.ranks:
        _check_regions(rank, metadata.num_blocks)
        for region in rank.regions:
            _check_arrays(region, metadata.block_size_tokens)
    return metadata


def _check_regions(rank: RankMetadata, num_blocks: int) -> None:
    if len({region.layer for region in rank.regions}) != len(rank.regions):
        raise ProtocolError("two regions have the same layer")
    for region in rank.regions:
        uneven = region.head_bytes and region.block_bytes % region.head_bytes
        end = region.base + (num_blocks - 1) * region.stride_bytes + region.block_bytes
        if region.stride_bytes < region.block_bytes or end > LIMIT or uneven:
            raise ProtocolError(f"impossible region: {region}, {num_blocks} blocks")


def _check_arrays(region: KvRegion, block_size_tokens: int) -> None:
    """The arrays must cover the block exactly."""
    if not region.arrays:
        return
    if region.tokens != block_size_tokens or any(
        region.tokens % array.group_tokens for array in region.arrays
    ):
        raise ProtocolError(
            f"the engine has blocks of {block_size_tokens} tokens, which contradicts {region}"
        )
    fills = len(heads_of(region)) * bytes_of_head(region) == region.block_bytes
    fills = fills and region.head_bytes in (0, bytes_of_head(region))
    if not fills or any(
        _end_of_array(region, array) > region.block_bytes for array in region.arrays
    ):
        raise ProtocolError(f"arrays do not cover the block exactly: {region}")


def _end_of_array(region: KvRegion, array: KvArray) -> int:
    """Offset behind the array's last byte in a block."""
    return (
        array.offset
        + (len(heads_of(region)) - 1) * array.head_stride
        + (region.tokens // array.group_tokens - 1) * array.group_stride
        + (array.items - 1) * array.item_stride
        + array.item_bytes
    )
