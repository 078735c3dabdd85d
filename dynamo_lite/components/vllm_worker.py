"""The decode worker: gets each request first, and keeps it."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import Gauge

from dynamo_lite.components.config import VllmWorkerConfig
from dynamo_lite.components.engine_setup import engine_file, engine_link, queue_config
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode_json
from dynamo_lite.protocol.errors import DynamoLiteError, EngineDied, StoreUnavailable
from dynamo_lite.runtime.generate import GenerateServer
from dynamo_lite.runtime.host import Host, ProcessSpec

if TYPE_CHECKING:
    from dynamo_lite.engine.remote_prefill.link import EngineLink
    from dynamo_lite.engine.vllm.core import VllmEngine

logger = logging.getLogger(__name__)

_POOL_PERIOD_S = 2.0
#: Unanswered descriptions in a row after which the engine is not trusted any more.
_MAX_SILENT = 5
#: Whose members write KV for this worker.
_PREFILL_COMPONENT = "PrefillWorker"


class VllmWorker:
    """Component. config: the fields of `VllmWorkerConfig`."""

    def __init__(self, config: Mapping[str, Any] | VllmWorkerConfig, spec: ProcessSpec):
        self._config = msgspec.convert(config, VllmWorkerConfig)
        self._spec = spec
        self._stack = AsyncExitStack()
        self._engine: VllmEngine | None = None
        self._server: GenerateServer | None = None
        self._host: Host | None = None
        self._metadata_key = ""
        self._closing = False

    async def start(self, host: Host) -> dict[str, Any]:
        self._host = host
        # vLLM takes seconds to import, which must not starve the lease.
        await asyncio.to_thread(__import__, "dynamo_lite.engine.vllm.core")
        from dynamo_lite.engine.vllm.core import VllmEngine

        host.progress("loading the model")
        link = self._link(host) if self._config.remote_prefill else None
        self._engine = engine = await self._stack.enter_async_context(
            VllmEngine(
                self._spec.engine_args,
                link=link,
                link_path=engine_file(self._spec, "engine.json"),
                messaging=host.messaging,
                registry=host.registry,
            )
        )
        self._server = server = await self._stack.enter_async_context(
            GenerateServer(host.messaging, engine, self._spec.bind_host)
        )
        host.spawn(self._deliver(engine, server), "engine-steps")
        await self._register(host, engine, server)
        if engine.metadata is not None:
            host.spawn(self._watch_pool(host, engine), "kv-pool")
        return {"model": engine.config.model_config.model}

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

    def _link(self, host: Host) -> "EngineLink":
        from dynamo_lite.engine.remote_prefill.link import DecodeLink

        config = self._config
        role = DecodeLink(
            max_local_prefill_length_tokens=config.max_local_prefill_length,
            max_prefill_queue_size=config.max_prefill_queue_size,
            remote_prefill_timeout_s=config.remote_prefill_timeout_s,
            queue_view_max_age_s=config.queue_view_max_age_s,
            prefill_component=_PREFILL_COMPONENT,
            queue=queue_config(config.queue),
        )
        return engine_link(self._spec, host.lease.id, role)

    async def _register(self, host: Host, engine: "VllmEngine", server: GenerateServer) -> None:
        """Metadata first: whoever sees the worker may write into its blocks."""
        namespace, lease = self._spec.namespace, host.lease
        if engine.metadata is not None:
            self._metadata_key = names.nixl_metadata_key(namespace, engine.metadata.engine_id)
            await host.store.put(self._metadata_key, encode_json(engine.metadata), lease=lease)
        name = self._spec.component
        model = engine.config.model_config.model
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

    async def _deliver(self, engine: "VllmEngine", server: GenerateServer) -> None:
        try:
            async for deltas in engine.steps():
                server.deliver(deltas)
        except EngineDied:
            server.hang_up("the worker's engine died")
            raise

    async def _watch_pool(self, host: Host, engine: "VllmEngine") -> None:
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
