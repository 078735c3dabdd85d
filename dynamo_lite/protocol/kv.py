"""Messages of decode workers to routers: which prefixes they hold, and their load.

Every worker publishes notices, numbered from 1 on. On request it publishes all that it holds,
behind a `KvCleared` at the beginning of a notice. Blocks are named by their chain hash
(`routing/kv_chain.py`), never by tokens. Changes that are applied in order may be repeated.
"""

from typing import Annotated

import msgspec

from dynamo_lite.protocol.codec import Decoder
from dynamo_lite.protocol.generate import Count
from dynamo_lite.protocol.records import LeaseId, Natural

BlockHash = Annotated[int, msgspec.Meta(ge=0, lt=1 << 56)]

#: Most blocks in a notice; approximate.
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
    #: Tokens per block; 0 if the worker does not publish what it holds.
    block_size_tokens: Count = 0


decode_kv_notice: Decoder[KvNotice] = Decoder(KvNotice)
