"""Messages of decode workers to routers: which prefixes they hold, and their load.

Every worker publishes notices, numbered from 1 on, and answers snapshot requests. Blocks are named
by their chain hash (`routing/kv_chain.py`), never by tokens. Changes that are applied in
order may be repeated from any point on: a snapshot, with all the notices that arrived while it was
fetched, is what the worker holds.
"""

from typing import Annotated

import msgspec

from dynamo_lite.protocol.codec import WIRE_VERSION, Decoder
from dynamo_lite.protocol.generate import Count
from dynamo_lite.protocol.records import LeaseId, Natural

BlockHash = Annotated[int, msgspec.Meta(ge=0, lt=1 << 56)]

#: Most parts of one snapshot.
MAX_PARTS = 4096
#: Most blocks in a part of a snapshot, or in a notice; approximate.
HASHES_PER_MESSAGE = 32_768


class KvStored(msgspec.Struct, frozen=True, array_like=True, tag="s", gc=False):
    """The worker now holds these blocks; the parent of each precedes it, or was held already."""

    hashes: list[BlockHash]


class KvRemoved(msgspec.Struct, frozen=True, array_like=True, tag="r", gc=False):
    """The worker no longer holds these blocks."""

    hashes: list[BlockHash]


class KvCleared(msgspec.Struct, frozen=True, array_like=True, tag="c", gc=False):
    """The worker holds no blocks."""


KvChange = KvStored | KvRemoved | KvCleared


class Load(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How busy an engine is."""

    #: Requests.
    running: Count = 0
    #: Requests.
    waiting: Count = 0
    #: Share of the blocks that cannot be given to a new request.
    kv_usage: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    #: Prompt tokens of requests without a first token.
    prefill_tokens: Natural = 0


class KvNotice(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. Sent on every change, and every second."""

    #: Lease of the worker's incarnation.
    lease_id: LeaseId
    #: One more than in its previous notice.
    number: Natural
    load: Load
    changes: list[KvChange] = []
    wire_version: int = WIRE_VERSION


class KvSnapshotRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Router to worker. Blocks are divided into parts by their hashes."""

    part: Annotated[int, msgspec.Meta(ge=0, lt=MAX_PARTS)] = 0
    #: The number that the worker chose; 0 in the first request.
    parts: Annotated[int, msgspec.Meta(ge=0, le=MAX_PARTS)] = 0


class KvSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks of one part that the worker holds."""

    lease_id: LeaseId
    #: Number of the last notice before the snapshot.
    number: Natural
    part: Natural
    parts: Annotated[int, msgspec.Meta(ge=1, le=MAX_PARTS)]
    #: 0 if the worker does not publish what it holds.
    block_size_tokens: Count
    load: Load
    held: list[BlockHash]
    wire_version: int = WIRE_VERSION


decode_kv_notice: Decoder[KvNotice] = Decoder(KvNotice)
decode_kv_snapshot_request: Decoder[KvSnapshotRequest] = Decoder(KvSnapshotRequest)
decode_kv_snapshot: Decoder[KvSnapshot] = Decoder(KvSnapshot)
