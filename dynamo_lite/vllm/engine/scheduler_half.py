"""The scheduler half of one role: its making, and its blocks."""

from typing import TYPE_CHECKING

from dynamo_lite.disagg.bridge import Bridge, Session, ThreadBridge
from dynamo_lite.disagg.decode.scheduler import DecodeScheduler
from dynamo_lite.disagg.engine_config import EngineConfig, PrefillEngineConfig
from dynamo_lite.disagg.prefill.scheduler import PrefillScheduler
from dynamo_lite.disagg.role_orders import RoleOrders
from dynamo_lite.disagg.server_clients import Servers
from dynamo_lite.runtime.drops import uncounted

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig


def make_half(
    config: EngineConfig,
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    orders: RoleOrders | None,
) -> DecodeScheduler | PrefillScheduler:
    """orders: taken beside the half's session; None for an engine that keeps its role."""
    cache, outside = vllm_config.cache_config, Servers(config)

    def open_bridge(session: Session) -> Bridge:
        if orders is None:
            return ThreadBridge(session)
        return ThreadBridge(orders.session(config, outside, session, uncounted))

    if isinstance(config.role, PrefillEngineConfig):
        return PrefillScheduler(config, cache.block_size, outside=outside, open_bridge=open_bridge)
    hashed = kv_cache_config.hash_block_size or cache.block_size
    return DecodeScheduler(
        config,
        cache.block_size,
        outside=outside,
        open_bridge=open_bridge,
        hash_block_size=hashed if cache.enable_prefix_caching else None,
        overlapping_steps=vllm_config.max_concurrent_batches,
        step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
    )


def bind_blocks(
    half: DecodeScheduler | PrefillScheduler, manager: "KVCacheManager", vllm_config: "VllmConfig"
) -> None:
    """Gives the half vLLM's blocks. manager: the engine's."""
    if isinstance(half, DecodeScheduler):
        caches = vllm_config.cache_config.enable_prefix_caching
        cache = manager.cache_blocks if caches else None
        half.bind_block_pool(manager.block_pool, cache, kept_free=manager.watermark_blocks)
    else:
        half.bind_block_pool(
            manager.block_pool, lambda request_id: manager.get_block_ids(request_id)[0]
        )
