"""The scheduler half: made once vLLM's blocks are there; its metadata once all ranks are up."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from dynamo_lite.disagg.bridge import ThreadBridge
from dynamo_lite.disagg.decode.scheduler import DecodeScheduler
from dynamo_lite.disagg.engine_config import EngineConfig, PrefillEngineConfig
from dynamo_lite.disagg.prefill.scheduler import BlocksOf, PrefillScheduler
from dynamo_lite.disagg.server_clients import NatsEtcdClients
from dynamo_lite.protocol.records import EngineMetadata, RankMetadata
from dynamo_lite.vllm.compat import hash_block_size
from dynamo_lite.vllm.engine.kv_groups import groups_print
from dynamo_lite.vllm.engine.opened_rank import RankHandshake

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)


def open_scheduler(
    config: EngineConfig,
    vllm_config: "VllmConfig",
    kv_config: "KVCacheConfig",
    manager: "KVCacheManager",
    blocks_of: BlocksOf,
) -> DecodeScheduler | PrefillScheduler:
    """blocks_of: see `BlocksOf`, of the manager's requests."""
    cache, clients = vllm_config.cache_config, NatsEtcdClients(config)
    if isinstance(config.role, PrefillEngineConfig):
        return PrefillScheduler(
            config,
            cache.block_size,
            manager.block_pool,
            blocks_of,
            clients=clients,
            open_bridge=ThreadBridge,
        )
    hashed = hash_block_size(kv_config, cache.block_size)
    # With several KV groups a part of a prompt's blocks is no prefix that another one can hit:
    # window and state groups keep its end only.
    groups = len(kv_config.kv_cache_groups)
    prefixes = cache.enable_prefix_caching and groups == 1
    if groups > 1:
        logger.info(
            "the model has %d KV groups: prefix reads, resumes, waits for shared prefixes and"
            " first tokens from prefill workers are off",
            groups,
        )
    return DecodeScheduler(
        config,
        cache.block_size,
        manager.block_pool,
        clients=clients,
        open_bridge=ThreadBridge,
        cache=manager.cache_blocks if prefixes else None,
        hash_block_size=hashed if prefixes else None,
        overlapping_steps=vllm_config.max_concurrent_batches,
    )


def engine_metadata(
    config: EngineConfig,
    block_size_tokens: int,
    kv_config: "KVCacheConfig",
    handshakes: Sequence["KVConnectorHandshakeMetadata"],
) -> EngineMetadata:
    """The engine's metadata from its ranks' handshakes; its fingerprint has only what they know,
    and the component adds all else.

    handshakes: in the order of `kv_memory.rank_index`.
    """
    shakes = [shake for shake in handshakes if isinstance(shake, RankHandshake)]
    layouts = {layout for shake in shakes for layout in shake.layouts}
    return EngineMetadata(
        engine_id=config.engine_id,
        lease_id=config.lease_id,
        fingerprint={
            "kv_layout": " and ".join(sorted(layouts)),
            "kv_groups": groups_print(kv_config),
        },
        block_size_tokens=block_size_tokens,
        num_blocks=kv_config.num_blocks,
        ranks=tuple(msgspec.msgpack.decode(s.rank, type=RankMetadata) for s in shakes),
    )
