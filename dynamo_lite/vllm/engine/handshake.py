"""What an engine's ranks tell its scheduler half of their memory: the engine's metadata."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from dynamo_lite.disagg.engine_config import EngineConfig
from dynamo_lite.protocol.records import EngineMetadata, RankMetadata

#: The entry of an engine's fingerprint that its ranks know.
KV_LAYOUT = "kv_layout"


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):
    """A rank's memory (RankMetadata, msgpack) and the orders of bytes in its blocks."""

    rank: bytes
    orders: frozenset[str]


def engine_metadata(
    link: EngineConfig,
    block_size_tokens: int,
    num_blocks: int,
    handshakes: Mapping[tuple[int, int], KVConnectorHandshakeMetadata],
) -> EngineMetadata:
    """handshakes: by pipeline stage and rank within it, as `kv_memory.rank_index` counts.

    Of the fingerprint only the KV layout is known here; the component adds the rest.
    """
    shakes = [shake for _, shake in sorted(handshakes.items()) if isinstance(shake, RankHandshake)]
    orders = {order for shake in shakes for order in shake.orders}
    return EngineMetadata(
        engine_id=link.engine_id,
        lease_id=link.lease_id,
        fingerprint={KV_LAYOUT: " and ".join(sorted(orders))},
        block_size_tokens=block_size_tokens,
        num_blocks=num_blocks,
        ranks=tuple(msgspec.msgpack.decode(s.rank, type=RankMetadata) for s in shakes),
    )
