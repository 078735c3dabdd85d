"""Records kept in etcd, as JSON. All of them hang on their owner's lease."""

from typing import Annotated

import msgspec

Natural = Annotated[int, msgspec.Meta(ge=0)]


class EndpointTransport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to reach one endpoint instance.

    nats_tcp: the NATS subject that takes its requests. Every endpoint has one;
              nobody serves it where an endpoint takes no requests over NATS
              (Frontend/http, PrefillWorker/prefill): its record says who is there.
    stream:   HOST:PORT of the TCP server that carries its token deltas, or its HTTP; absent
              for endpoints that answer with one reply.
    """

    nats_tcp: str
    stream: str | None = None


class EndpointRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One endpoint of one live process, at `names.endpoint_key(...)`.

    started_at is in seconds since the epoch, for display only.
    """

    component: str
    endpoint: str
    namespace: str
    lease_id: int
    transport: EndpointTransport
    pid: int = 0
    host: str = ""
    status_url: str = ""
    started_at: float = 0.0
    model: str = ""


class KvRegion(msgspec.Struct, frozen=True, kw_only=True):
    """One equally spaced run of blocks in one rank's memory.

    Block `i` occupies `block_bytes` bytes at `base + i * stride_bytes`. A layer
    has one region where K and V of a block lie together, and two where they
    are separate planes.
    """

    layer: str
    plane: Natural
    base: Natural
    stride_bytes: Annotated[int, msgspec.Meta(gt=0)]
    block_bytes: Annotated[int, msgspec.Meta(gt=0)]


class RankMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's NIXL agent and KV pool.

    agent: NIXL's own metadata blob (base64 in JSON).
    memory: NIXL memory type, "DRAM" or "VRAM"; device: its device index.
    """

    agent: bytes
    memory: str
    device: Natural
    regions: tuple[KvRegion, ...]


class EngineMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """All that a prefill worker needs to write into a decode engine's blocks.

    Stored at `names.nixl_metadata_key(namespace, engine_id)`; loaded lazily.
    fingerprint: what must be equal on both sides (model, dtype, kernel layout,
    vLLM version), as readable `name=value` pairs so that a refusal can name
    the difference.
    """

    engine_id: str
    lease_id: int
    fingerprint: dict[str, str]
    block_size_tokens: Annotated[int, msgspec.Meta(gt=0)]
    num_blocks: Annotated[int, msgspec.Meta(gt=0)]
    ranks: tuple[RankMetadata, ...]
