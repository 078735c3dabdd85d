"""The scheduler half of the role that an engine has now."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from dynamo_lite.disagg.bridge import Bridge, OpenSession, ThreadBridge
from dynamo_lite.disagg.decode.scheduler import DecodeScheduler
from dynamo_lite.disagg.engine_config import EngineConfig, PrefillEngineConfig
from dynamo_lite.disagg.messages import NewRole
from dynamo_lite.disagg.prefill.scheduler import PrefillScheduler
from dynamo_lite.disagg.role_orders import RoleOrders
from dynamo_lite.disagg.server_clients import NatsEtcdClients
from dynamo_lite.runtime.drops import uncounted
from dynamo_lite.runtime.etcd.client import free_cancelled_calls
from dynamo_lite.runtime.process.logs import hold_lease
from dynamo_lite.vllm.engine.connector_types import NewRanksMetadata, engine_metadata
from dynamo_lite.vllm.engine.role_change import RoleChange

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

_BRIDGE_START_S = 15.0


class ActiveHalf:
    """Makes the half, and in a switchable engine replaces it. file: with `config`.

    All calls come from the engine's thread.
    """

    def __init__(
        self,
        config: EngineConfig,
        file: Path,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
    ):
        self._config = config
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._manager: KVCacheManager | None = None
        #: None for an engine that keeps its role.
        self._change = RoleChange(RoleOrders(), file) if config.switchable else None
        #: Of all bridges of a switchable engine: gRPC keeps each loop that has used it.
        self._loop: asyncio.AbstractEventLoop | None = None
        #: None before `bind`, and between two roles, while the ranks open the other one.
        self.half: DecodeScheduler | PrefillScheduler | None = None

    @property
    def short_length(self) -> int | None:
        """Prompts up to this length pass longer ones; None: in this role none does."""
        role = self._config.role
        if not isinstance(role, PrefillEngineConfig) or role.queue.order != "short-first":
            return None
        return role.queue.short_length

    @property
    def busy(self) -> bool:
        """Whether the engine must make steps even without requests."""
        ordered = self._change is not None and self._change.orders.waiting
        return ordered or self.half is None or self.half.busy

    def bind(self, manager: "KVCacheManager") -> None:
        """vLLM's blocks are there: makes the half of the first role."""
        self._manager, self.half = manager, self._made(manager)

    def begin(self, handshakes: Sequence[KVConnectorHandshakeMetadata]) -> None:
        """Makes the engine's metadata, and connects to the servers. handshakes: of all ranks."""
        assert self.half is not None
        self.half.metadata = engine_metadata(
            self._config,
            self._vllm_config.cache_config.block_size,
            self._kv_cache_config.num_blocks,
            handshakes,
        )
        self.half.bridge.start(_BRIDGE_START_S)

    def leave(self) -> NewRole | None:
        """Follows an order to change the role, if there is one and nothing is open."""
        if self._change is None or self.half is None or self._manager is None:
            return None
        begun = self._change.begin(self.half, self._manager.block_pool, self._config)
        if begun is None:
            return None
        self._config, new = begun
        hold_lease(self._config.lease_id)
        self.half = None
        free_cancelled_calls()
        return new

    def take(self, ranks: NewRanksMetadata) -> None:
        """All ranks are open in the new role."""
        assert self._change is not None and self._manager is not None
        self.half = self._made(self._manager)
        self._change.orders.followed()
        self.begin([shake for _, shake in sorted(ranks.handshakes.items())])

    def _made(self, manager: "KVCacheManager") -> DecodeScheduler | PrefillScheduler:
        config = self._config
        cache, clients = self._vllm_config.cache_config, NatsEtcdClients(config)
        orders = None if self._change is None else self._change.orders

        def open_bridge(session: OpenSession) -> Bridge:
            if orders is None:
                return ThreadBridge(session)
            if self._loop is None or self._loop.is_running():  # a session that hangs while it ends
                self._loop = uvloop.new_event_loop()
            session = orders.session(config, clients, session, uncounted)
            return ThreadBridge(session, loop=self._loop)

        if isinstance(config.role, PrefillEngineConfig):
            return PrefillScheduler(
                config,
                cache.block_size,
                manager.block_pool,
                lambda request_id: manager.get_block_ids(request_id)[0],
                clients=clients,
                open_bridge=open_bridge,
            )
        hashed = self._kv_cache_config.hash_block_size or cache.block_size
        return DecodeScheduler(
            config,
            cache.block_size,
            manager.block_pool,
            clients=clients,
            open_bridge=open_bridge,
            cache=manager.cache_blocks if cache.enable_prefix_caching else None,
            kept_free=manager.watermark_blocks,
            hash_block_size=hashed if cache.enable_prefix_caching else None,
            overlapping_steps=self._vllm_config.max_concurrent_batches,
        )
