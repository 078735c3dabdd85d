"""Records kept in etcd, as JSON. Each is bound to its owner's lease."""

from typing import Annotated

import msgspec

#: Sizes and addresses have at most 63 bits.
LIMIT = (1 << 63) - 1
Natural = Annotated[int, msgspec.Meta(ge=0, le=LIMIT)]
Positive = Annotated[int, msgspec.Meta(gt=0, le=LIMIT)]
#: A NATS subject without wildcards.
Subject = Annotated[str, msgspec.Meta(pattern=r"^[!-)+-=?-~]{1,512}\Z")]
#: For display.
Text = Annotated[str, msgspec.Meta(max_length=1024)]
LAST_PORT = 65535
Port = Annotated[int, msgspec.Meta(gt=0, le=LAST_PORT)]
#: etcd's lease ids are positive and signed; 0: no lease.
LeaseId = Annotated[int, msgspec.Meta(ge=0, le=LIMIT)]


class EndpointTransport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to reach one endpoint instance."""

    #: The NATS subject of its requests. Every endpoint has one. Endpoints that take no requests
    #: over NATS (Frontend/http, VllmWorker/generate, PrefillWorker/prefill, Planner/plan) do not
    #: subscribe to it: their records only show the member.
    nats_tcp: Subject
    #: HOST:PORT of the TCP server for its token deltas, or of its HTTP server; absent for endpoints
    #: that answer with one reply.
    stream: str | None = None
    #: Whether that TCP server uses TLS.
    tls: bool = False


class StockEngine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a Forwarder uses a stock engine that has joined.

    A reader ignores an engine with a role or protocol that it does not know.
    """

    #: `http://HOST:PORT` of its OpenAI server.
    url: Annotated[str, msgspec.Meta(max_length=512)]
    #: prefill, decode or prefill-decode.
    role: Annotated[str, msgspec.Meta(max_length=64)]
    #: Its handover protocol.
    protocol: Annotated[str, msgspec.Meta(max_length=64)]
    #: Where its side of the handover listens: Mooncake's and SGLang's bootstrap server, KVT,
    #: MoRIIO's handshake. Absent: the URL's host, the protocol's port.
    transfer_host: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    transfer_port: Port | None = None
    #: MoRIIO's second port.
    notify_port: Port | None = None


class EndpointRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One endpoint of one live process, at `names.endpoint_key(...)`."""

    component: str
    endpoint: str
    namespace: str
    lease_id: LeaseId
    transport: EndpointTransport
    pid: int = 0
    #: Number of the process among those of its service and supervisor.
    instance: int = 0
    host: str = ""
    status_url: str = ""
    #: Seconds since the epoch, for display only.
    started_at: float = 0.0
    model: str = ""
    #: Version of dynamo-lite in that process, for display; empty before 0.2.0.
    version: str = ""
    #: The process's WIRE_VERSION; 0, which fits no process, if the record does not say it.
    wire_version: Natural = 0
    #: Only of a stock engine: the process of this record stands for it.
    engine: StockEngine | None = None


class KvArray(msgspec.Struct, frozen=True, kw_only=True):
    """One array inside each block of a region: items by head, group of tokens, and number.

    The strides are bytes.
    """

    #: Offset of the first item from the start of the block.
    offset: Natural
    head_stride: Natural
    group_stride: Natural
    item_stride: Natural
    #: How many consecutive tokens share their items; 1, unless a kernel packs several.
    group_tokens: Positive
    #: How many items a head has for each group.
    items: Positive
    #: Contiguous bytes of one item.
    item_bytes: Positive


class KvRegion(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's equally spaced run of blocks in one rank's memory.

    Block `i` occupies `block_bytes` bytes at `base + i * stride_bytes`.
    """

    layer: str
    base: Natural
    stride_bytes: Positive
    block_bytes: Positive
    #: The layer's KV group, by vLLM's number: each group has its own table of blocks.
    group: Natural = 0
    #: The first of the model's KV heads in a block.
    first_head: Natural = 0
    #: Bytes of one head if heads are the outermost dimension of a block; 0 if a block cannot be cut
    #: by heads.
    head_bytes: Natural = 0
    #: Tokens of a block; 0 if not known.
    tokens: Natural = 0
    #: Where the bytes of each token are, so that a block can be rearranged for another block size
    #: or order; empty if not known.
    arrays: tuple[KvArray, ...] = ()


class RankMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's NIXL agent and KV pool."""

    #: NIXL's own metadata blob (base64 in JSON).
    agent: bytes
    #: NIXL memory type, "DRAM" or "VRAM".
    memory: str
    #: Device index.
    device: Natural
    regions: tuple[KvRegion, ...]


class EngineMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a prefill worker needs to write into a decode engine's blocks.

    Stored at `names.nixl_metadata_key(namespace, engine_id)`; loaded lazily, by
    `decode_engine` of `kv_regions.py`.
    """

    engine_id: str
    lease_id: LeaseId
    #: What must be equal on both sides (model, dtype, kernel layout, vLLM version), as readable
    #: `name=value` pairs, so that a refusal can name the difference.
    fingerprint: dict[str, str]
    block_size_tokens: Positive
    num_blocks: Positive
    ranks: tuple[RankMetadata, ...]

    @property
    def num_groups(self) -> int:
        """KV groups of the model."""
        return 1 + max((region.group for rank in self.ranks for region in rank.regions), default=0)


class LinkRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill worker does not use its link to a decode engine: a transfer over it has failed, or
    the engines do not fit.

    At `names.link_key(...)`, under the prefill worker's lease, for as long as that is so.
    """

    prefill_lease_id: LeaseId
    engine_id: str
    decode_lease_id: LeaseId
    #: Why.
    detail: Annotated[str, msgspec.Meta(min_length=1)]
    #: When it is used again, in seconds since the epoch, for display only; None: never.
    next_try: float | None = None
