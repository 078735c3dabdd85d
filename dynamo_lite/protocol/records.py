"""Records kept in etcd, as JSON. All of them hang on their owner's lease."""

import hashlib
from typing import Annotated

import msgspec

from dynamo_lite.protocol.codec import decode_json, encode_json
from dynamo_lite.protocol.errors import ProtocolError

#: Sizes and addresses: no memory of ours reaches beyond 63 bits.
_LIMIT = (1 << 63) - 1
Natural = Annotated[int, msgspec.Meta(ge=0, le=_LIMIT)]
Positive = Annotated[int, msgspec.Meta(gt=0, le=_LIMIT)]
#: A NATS subject without wildcards.
Subject = Annotated[str, msgspec.Meta(pattern=r"^[!-)+-=?-~]{1,512}\Z")]
#: etcd's lease ids are positive and signed; 0 is nobody's.
LeaseId = Annotated[int, msgspec.Meta(ge=0, le=_LIMIT)]


class EndpointTransport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to reach one endpoint instance.

    nats_tcp: the NATS subject that takes its requests. Every endpoint has one;
              nobody serves it where an endpoint takes no requests over NATS
              (Frontend/http, PrefillWorker/prefill): its record says who is there.
    stream:   HOST:PORT of the TCP server that carries its token deltas, or its HTTP; absent
              for endpoints that answer with one reply.
    """

    nats_tcp: Subject
    stream: str | None = None


class EndpointRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One endpoint of one live process, at `names.endpoint_key(...)`.

    started_at is in seconds since the epoch, for display only.
    """

    component: str
    endpoint: str
    namespace: str
    lease_id: LeaseId
    transport: EndpointTransport
    pid: int = 0
    host: str = ""
    status_url: str = ""
    started_at: float = 0.0
    model: str = ""


class KvArray(msgspec.Struct, frozen=True, kw_only=True):
    """One array inside each block of a region: items by head, group of tokens, and number.

    The strides are bytes, the first item lies `offset` bytes into the block.
    group_tokens: how many consecutive tokens share their items (1, unless a kernel packs
    several). items: how many a head has for each group; item_bytes: what each takes, in
    one piece.
    """

    offset: Natural
    head_stride: Natural
    group_stride: Natural
    item_stride: Natural
    group_tokens: Positive
    items: Positive
    item_bytes: Positive


class KvRegion(msgspec.Struct, frozen=True, kw_only=True):
    """One equally spaced run of blocks in one rank's memory.

    Block `i` occupies `block_bytes` bytes at `base + i * stride_bytes`. A layer
    has one region where K and V of a block lie together, and two where they
    are separate planes.

    first_head: the first of the model's KV heads in a block. head_bytes: what each
    takes where heads lie outermost in a block; 0 where it cannot be cut into them.

    tokens, arrays: how many tokens a block has, and where the bytes of each are, so that
    it can be laid out for blocks of another size or order; 0 and empty where that is not
    known.
    """

    layer: str
    plane: Natural
    base: Natural
    stride_bytes: Positive
    block_bytes: Positive
    first_head: Natural = 0
    head_bytes: Natural = 0
    tokens: Natural = 0
    arrays: tuple[KvArray, ...] = ()

    @property
    def heads(self) -> int:
        """KV heads in a block; 1 where it is not known to consist of them."""
        if self.arrays:
            return self.block_bytes // bytes_of_head(self)
        return self.block_bytes // self.head_bytes if self.head_bytes else 1


def bytes_of_head(region: KvRegion) -> int:
    """What one head takes in a block whose arrays are known."""
    return sum(
        region.tokens // array.group_tokens * array.items * array.item_bytes
        for array in region.arrays
    )


class Scratch(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a rank that belongs to no block: there writers try their way to the rank.

    `slots` slots of `slot_bytes` each, back to back from `base` on.
    """

    base: Natural
    slots: Positive
    slot_bytes: Positive


class RankMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's NIXL agent and KV pool.

    agent: NIXL's own metadata blob (base64 in JSON).
    memory: NIXL memory type, "DRAM" or "VRAM"; device: its device index. Both also of
    `scratch`, without which nobody writes into the rank's blocks.
    """

    agent: bytes
    memory: str
    device: Natural
    regions: tuple[KvRegion, ...]
    scratch: Scratch | None = None


class EngineMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """All that a prefill worker needs to write into a decode engine's blocks.

    Stored at `names.nixl_metadata_key(namespace, engine_id)`, by `encode_engine`;
    loaded lazily.
    fingerprint: what must be equal on both sides (model, dtype, kernel layout,
    vLLM version), as readable `name=value` pairs so that a refusal can name
    the difference.
    """

    engine_id: str
    lease_id: LeaseId
    fingerprint: dict[str, str]
    block_size_tokens: Positive
    num_blocks: Positive
    ranks: tuple[RankMetadata, ...]


class LinkRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a prefill worker found of its way to a decode engine, at `names.link_key(...)`,
    under the prefill worker's lease.

    ok: whether it gives KV to that engine; detail: why not. lanes: pairs of a rank that
    writes and one that is written into. contact_s: from the first contact until what
    was written had been read back; round_trip_s: the same once more, when all was
    connected; of the slowest pair, 0 where nothing was tried. checked_at: in seconds
    since the epoch, for display only.
    """

    prefill_lease_id: LeaseId
    engine_id: str
    decode_lease_id: LeaseId
    ok: bool
    detail: str = ""
    lanes: Natural = 0
    contact_s: float = 0.0
    round_trip_s: float = 0.0
    checked_at: float = 0.0


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An EngineMetadata as it lies in the store. checksum: of `metadata` as it is spelled."""

    checksum: str
    metadata: msgspec.Raw


def encode_engine(metadata: EngineMetadata) -> bytes:
    raw = encode_json(metadata)
    return encode_json(EngineRecord(checksum=_checksum(raw), metadata=msgspec.Raw(raw)))


def decode_engine(data: bytes) -> EngineMetadata:
    """Raises ProtocolError when it is not one, was changed, or cannot be true.

    Addresses that are slightly wrong would still be somebody's memory, and NIXL
    cannot load an agent again whose blob it once half accepted: hence the checksum.
    """
    record = decode_json(data, EngineRecord)
    raw = bytes(record.metadata)
    if record.checksum != _checksum(raw):
        raise ProtocolError("the engine's metadata was changed: its checksum is another")
    metadata = decode_json(raw, EngineMetadata)
    check_engine(metadata)
    return metadata


def check_engine(metadata: EngineMetadata) -> None:
    """Raises ProtocolError when its memory cannot lie as it says."""
    for rank in metadata.ranks:
        _check_regions(rank, metadata.num_blocks)
        _check_scratch(rank, metadata.num_blocks)
        for region in rank.regions:
            _check_arrays(region, metadata.block_size_tokens)


def _checksum(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def _end(region: KvRegion, num_blocks: int) -> int:
    return region.base + (num_blocks - 1) * region.stride_bytes + region.block_bytes


def _check_regions(rank: RankMetadata, num_blocks: int) -> None:
    if len({(region.layer, region.plane) for region in rank.regions}) != len(rank.regions):
        raise ProtocolError("a layer's plane is there twice")
    for region in rank.regions:
        uneven = region.head_bytes and region.block_bytes % region.head_bytes
        beyond = _end(region, num_blocks) > _LIMIT
        if region.stride_bytes < region.block_bytes or beyond or uneven:
            raise ProtocolError(f"impossible region: {region}, {num_blocks} blocks")


def _check_arrays(region: KvRegion, block_size_tokens: int) -> None:
    """The arrays must fill the block: nobody's bytes beside it are theirs."""
    if not region.arrays:
        return
    if region.tokens != block_size_tokens or any(
        region.tokens % array.group_tokens for array in region.arrays
    ):
        raise ProtocolError(f"blocks of {block_size_tokens} tokens, not as in {region}")
    fills = region.heads * bytes_of_head(region) == region.block_bytes
    fills = fills and region.head_bytes in (0, bytes_of_head(region))
    if not fills or any(
        _end_of_array(region, array) > region.block_bytes for array in region.arrays
    ):
        raise ProtocolError(f"arrays that are not the block: {region}")


def _end_of_array(region: KvRegion, array: KvArray) -> int:
    """Behind the array's last byte in a block."""
    return (
        array.offset
        + (region.heads - 1) * array.head_stride
        + (region.tokens // array.group_tokens - 1) * array.group_stride
        + (array.items - 1) * array.item_stride
        + array.item_bytes
    )


def _check_scratch(rank: RankMetadata, num_blocks: int) -> None:
    """What is written there must not be anybody's KV."""
    if (scratch := rank.scratch) is None:
        return
    end = scratch.base + scratch.slots * scratch.slot_bytes
    if end > _LIMIT:
        raise ProtocolError(f"impossible scratch memory: {scratch}")
    for region in rank.regions:
        if scratch.base < _end(region, num_blocks) and region.base < end:
            raise ProtocolError(f"scratch memory in the blocks of layer {region.layer}")
