"""The decode worker: gets each request first, and keeps it."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import msgspec
from prometheus_client import Gauge

from dynamo_lite.components.config import VllmWorkerConfig
from dynamo_lite.components.parts import WorkerParts
from dynamo_lite.components.vllm_parts import VllmParts
from dynamo_lite.engine.base import DecodeEngine
from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import (
    DeadlineExceeded,
    EngineDied,
    StoreUnavailable,
    Unavailable,
)
from dynamo_lite.protocol.prefill import EngineStatus
from dynamo_lite.protocol.records import encode_engine
from dynamo_lite.runtime.generate import GenerateServer
from dynamo_lite.runtime.health import HealthBeat
from dynamo_lite.runtime.host import Host, ProcessSpec

logger = logging.getLogger(__name__)

_POOL_PERIOD_S = 2.0
#: Unanswered descriptions in a row after which the engine is not trusted any more.
_MAX_SILENT = 5


class VllmWorker:
    """Component. config: the fields of `VllmWorkerConfig`."""

    def __init__(
        self,
        config: Mapping[str, Any] | VllmWorkerConfig,
        spec: ProcessSpec,
        parts: WorkerParts | None = None,
    ):
        self._config = msgspec.convert(config, VllmWorkerConfig)
        self._spec = spec
        self._parts = parts or VllmParts(spec)
        self._stack = AsyncExitStack()
        self._engine: DecodeEngine | None = None
        self._server: GenerateServer | None = None
        self._host: Host | None = None
        self._metadata_key = ""
        self._closing = False

    async def start(self, host: Host) -> dict[str, Any]:
        self._host = host
        await self._parts.prepare()
        host.progress("loading the model")
        self._engine = engine = await self._stack.enter_async_context(
            self._parts.open_decode_engine(host, self._config)
        )
        self._server = server = await self._stack.enter_async_context(
            GenerateServer(host.messaging, engine, self._spec.bind_host)
        )
        host.spawn(self._deliver(engine, server), "engine-steps")
        await self._register(host, engine, server)
        if engine.metadata is not None:
            host.spawn(self._watch_pool(host, engine), "kv-pool")
        return {"model": engine.model}

    async def drain(self, grace_s: float) -> None:
        """Finishes what it has; prompts that wait for help unclaimed become local."""
        if self._metadata_key and self._host is not None and self._host.lease.loss is None:
            with contextlib.suppress(StoreUnavailable):
                await self._host.store.delete(self._metadata_key)
        if self._server is not None:
            self._server.refuse_new("this worker is draining")
            if not await self._server.wait_idle(grace_s):
                logger.warning("%d requests outlived the grace", self._server.in_flight)

    async def close(self) -> None:
        self._closing = True
        await self._stack.aclose()

    def health(self) -> dict[str, Any]:
        if self._engine is None or self._server is None:
            return {"ok": False}
        load = self._engine.load
        return {
            "ok": True,
            "in_flight": self._server.in_flight,
            "running": load.running,
            "waiting": load.waiting,
            "kv_usage": load.kv_usage,
        }

    async def _register(self, host: Host, engine: DecodeEngine, server: GenerateServer) -> None:
        """Metadata first: whoever sees the worker may write into its blocks."""
        namespace, lease = self._spec.namespace, host.lease
        if engine.metadata is not None:
            self._metadata_key = names.nixl_metadata_key(namespace, engine.metadata.engine_id)
            await host.store.put(self._metadata_key, encode_engine(engine.metadata), lease=lease)
        name = self._spec.component
        model = engine.model
        generate = names.endpoint_subject(namespace, name, "generate", lease.id)
        metrics = names.endpoint_subject(namespace, name, "load_metrics", lease.id)
        await self._stack.enter_async_context(server.serve(generate))
        await self._stack.enter_async_context(host.messaging.serve(metrics, self._load_metrics))
        await host.register("load_metrics", model=model)
        await host.register("generate", stream=server.stream_address, model=model)

    async def _load_metrics(self, _payload: bytes) -> bytes:
        """The engine's load, as msgpack."""
        assert self._engine is not None
        return msgspec.msgpack.encode(self._engine.load)

    async def _deliver(self, engine: DecodeEngine, server: GenerateServer) -> None:
        try:
            async for deltas in engine.steps():
                server.deliver(deltas)
        except EngineDied:
            server.hang_up("the worker's engine died")
            raise

    async def _watch_pool(self, host: Host, engine: DecodeEngine) -> None:
        """Asks the engine's process how its blocks stand, for the metrics."""
        gauge = _pool_gauges(host)
        silent = 0
        while True:
            try:
                status = await engine.describe()
            except DynamoLiteError as exc:
                if self._closing:
                    return
                silent = silent + 1 if host.messaging.connected else 0
                logger.warning("the engine did not describe itself: %s", exc)
                if silent == _MAX_SILENT:
                    raise EngineDied("the engine's bridge is silent") from exc
            else:
                silent = 0
                gauge["free"].set(status.free_blocks)
                gauge["total"].set(status.total_blocks)
                gauge["quarantined"].set(status.quarantined)
                gauge["depth"].set(float("nan") if status.queue_jobs is None else status.queue_jobs)
            await asyncio.sleep(_POOL_PERIOD_S)


def _pool_gauges(host: Host) -> dict[str, Gauge]:
    return {
        name: Gauge(metric, text, registry=host.registry)
        for name, metric, text in (
            ("free", "dynamo_lite_kv_blocks_free", "KV blocks that a new request may take"),
            ("total", "dynamo_lite_kv_blocks_total", "KV blocks of the engine"),
            (
                "quarantined",
                "dynamo_lite_quarantined_attempts",
                "Withdrawn remote prefills whose blocks a writer may still touch",
            ),
            (
                "depth",
                "dynamo_lite_prefill_queue_depth",
                "Jobs on the prefill queue, waiting and in flight",
            ),
        )
    }
