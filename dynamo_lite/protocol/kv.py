"""What decode workers tell routers: which prefixes they hold, and how busy they are.

Every worker publishes notices, numbered from 1 on, and answers requests for a
snapshot. Blocks are named by their chain hash (`policy/kv_chain.py`), never by tokens.
Applied in order, from any point on, changes may be repeated: a snapshot with all the
notices that came while it was fetched is what the worker holds.
"""

from typing import Annotated

import msgspec

from dynamo_lite.protocol.codec import WIRE_VERSION, Decoder
from dynamo_lite.protocol.generate import Count
from dynamo_lite.protocol.records import LeaseId, Natural

BlockHash = Annotated[int, msgspec.Meta(ge=0, lt=1 << 56)]

#: Of one snapshot; and so many hashes are in each part, or in a notice, more or less.
MAX_PARTS = 4096
HASHES_PER_MESSAGE = 32_768


class KvStored(msgspec.Struct, frozen=True, array_like=True, tag="s", gc=False):
    """The worker holds these blocks now; each one's parent is before it, or held already."""

    hashes: list[BlockHash]


class KvRemoved(msgspec.Struct, frozen=True, array_like=True, tag="r", gc=False):
    """It holds these no longer. cut: nor these, but some behind them."""

    hashes: list[BlockHash]
    cut: list[BlockHash] = []


class KvCleared(msgspec.Struct, frozen=True, array_like=True, tag="c", gc=False):
    """It holds nothing."""


KvChange = KvStored | KvRemoved | KvCleared


class Load(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How busy an engine is.

    running, waiting: requests. kv_usage: share of the blocks that cannot be given to a
    new request. prefill_tokens: of prompts without a first token. queue_jobs, queue_tokens:
    what all decode workers have on the prefill queue and with prefill workers, as this one
    knows it; the same for all.
    """

    running: Count = 0
    waiting: Count = 0
    kv_usage: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    prefill_tokens: Natural = 0
    queue_jobs: Natural = 0
    queue_tokens: Natural = 0


class KvNotice(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, whenever something changed, and every second.

    lease_id: its incarnation. number: one more than the last one's.
    """

    lease_id: LeaseId
    number: Natural
    load: Load
    changes: list[KvChange] = []
    wire_version: int = WIRE_VERSION


class KvSnapshotRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Router to worker. Blocks fall into parts by their hashes.

    parts: as the worker has chosen; 0 with the first one.
    """

    part: Annotated[int, msgspec.Meta(ge=0, lt=MAX_PARTS)] = 0
    parts: Annotated[int, msgspec.Meta(ge=0, le=MAX_PARTS)] = 0


class KvSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker holds, of the blocks of one part.

    number: of the last notice before it. block_size_tokens: 0 where the worker does not
    say what it holds. cut: not held, though some behind them are.
    """

    lease_id: LeaseId
    number: Natural
    part: Natural
    parts: Annotated[int, msgspec.Meta(ge=1, le=MAX_PARTS)]
    block_size_tokens: Count
    load: Load
    held: list[BlockHash]
    cut: list[BlockHash] = []
    wire_version: int = WIRE_VERSION


decode_kv_notice: Decoder[KvNotice] = Decoder(KvNotice)
decode_kv_snapshot_request: Decoder[KvSnapshotRequest] = Decoder(KvSnapshotRequest)
decode_kv_snapshot: Decoder[KvSnapshot] = Decoder(KvSnapshot)
