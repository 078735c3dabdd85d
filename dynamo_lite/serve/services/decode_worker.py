"""The decode worker: takes requests, and keeps each until its end."""

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import msgspec

from dynamo_lite.disagg.engine import DecodeEngine, KvEvents
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import DeadlineExceeded, EngineDied, Unavailable
from dynamo_lite.protocol.generate import TokenDelta
from dynamo_lite.protocol.health import EngineStatus, Leave
from dynamo_lite.protocol.kv import Load
from dynamo_lite.protocol.prefill import decode_first_token
from dynamo_lite.protocol.records import encode_engine
from dynamo_lite.request_plane.admission import limits
from dynamo_lite.request_plane.server import GenerateServer
from dynamo_lite.routing.kv_publisher import KvPublisher
from dynamo_lite.runtime.drops import counted
from dynamo_lite.runtime.members.live_options import LiveOptions
from dynamo_lite.runtime.process.component import Host, ProcessSpec
from dynamo_lite.serve.services.config import VllmWorkerConfig
from dynamo_lite.serve.services.engine_probe import NOT_LOADED, EngineProbe, start_heartbeats
from dynamo_lite.serve.services.generation_trace import TracedGeneration
from dynamo_lite.serve.services.metrics import DECODE_GAUGES, StatusGauges
from dynamo_lite.serve.services.vllm_backend import VllmBackend

logger = logging.getLogger(__name__)

_LEAVE_TRIES = 3


class VllmWorker:
    def __init__(
        self,
        config: Mapping[str, Any] | VllmWorkerConfig,
        spec: ProcessSpec,
        parts: VllmBackend | None = None,
    ):
        self._config = msgspec.convert(config, VllmWorkerConfig)
        self._spec = spec
        self._parts = parts or VllmBackend(spec)
        self._stack = AsyncExitStack()
        self._engine: DecodeEngine | None = None
        self._server: GenerateServer | None = None
        self._traced: TracedGeneration | None = None
        self._host: Host | None = None
        self._probe: EngineProbe | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._options: LiveOptions | None = None
        self._publisher: KvPublisher | None = None
        #: Leases of the prefill workers that may write into its blocks.
        self._writers: list[int] = []

    async def start(self, host: Host) -> dict[str, Any]:
        self._host = host
        await self._parts.prepare()
        host.progress("loading the model")
        self._engine = engine = await self._stack.enter_async_context(
            self._parts.open_decode_engine(host, self._config)
        )
        traced = None if host.tracer is None else TracedGeneration(engine, host.tracer)
        self._traced = traced
        self._server = server = await self._stack.enter_async_context(
            GenerateServer(
                traced or engine,
                self._spec.bind_host,
                max_in_flight=self._config.max_in_flight_requests,
                max_prompt_tokens=self._config.max_queued_tokens,
                on_drop=host.drops,
                certificates=host.own_certificates,
            )
        )
        self._options = options = host.live_options(
            self._config,
            lambda values: server.limit(limits(self._config, values)),
        )
        await self._stack.enter_async_context(options.following())
        host.spawn(_disconnecting(server, self._deliver(engine), "died"), "engine-steps")
        if self._config.kv_events:
            await self._publish_to_routers(host, engine, server)
        await self._register(host, engine, server)
        self._watch(host, engine, server)
        return {"model": engine.model}

    async def drain(self, grace_s: float) -> None:
        """Finishes its requests. Prompts that wait for an unclaimed remote prefill are prefilled
        locally."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if self._server is not None:
            self._server.refuse_new("this worker is draining")
            logger.info("draining: %d requests in flight are finished", self._server.in_flight)
        if self._host is not None and self._engine is not None:
            await self._stop_remote_prefills(self._host, self._engine)
        if self._server is not None and not await self._server.wait_idle(grace_s):
            logger.warning(
                "drain timeout after %g s: %d requests are still in flight",
                grace_s,
                self._server.in_flight,
            )

    async def close(self) -> None:
        if self._probe is not None:
            self._probe.closing = True
        await self._stack.aclose()

    def health(self) -> Mapping[str, Any]:
        if self._engine is None or self._server is None or self._probe is None:
            return NOT_LOADED
        assert self._options is not None
        load, metadata = self._engine.load, self._engine.metadata
        blocks = (metadata.num_blocks, metadata.block_size_tokens) if metadata else (0, 0)
        return {
            **self._probe.facts(),
            "in_flight": self._server.in_flight,
            "running": load.running,
            "waiting": load.waiting,
            "kv_usage": load.kv_usage,
            "kv_tokens": blocks[0] * blocks[1],
            "max_running": load.max_running,
            "options": self._options.facts(),
            **self._writer_facts(self._engine, self._probe, self._host),
        }

    def _writer_facts(
        self, engine: DecodeEngine, probe: EngineProbe, host: Host | None
    ) -> Mapping[str, Any]:
        """The leases of the prefill workers that may write into its blocks, and the age of this
        information."""
        if engine.metadata is None:
            return {"writers": [], "writers_age_s": 0.0}
        if probe.asked_at is None or host is None:
            return {}
        age_s = host.clock.monotonic() - probe.asked_at
        return {"writers": [f"{lease:x}" for lease in self._writers], "writers_age_s": age_s}

    def _watch(self, host: Host, engine: DecodeEngine, server: GenerateServer) -> None:
        gauges = None
        if engine.metadata is not None:
            gauges = StatusGauges(host.registry, DECODE_GAUGES)

        def on_status(status: EngineStatus) -> None:
            self._writers = status.writers
            if gauges is not None:
                gauges.show(status)

        self._probe = probe = EngineProbe(
            engine,
            host.messaging,
            host.clock,
            busy=lambda: server.in_flight > 0,
            step_timeout_s=self._config.step_timeout_s,
            on_status=on_status,
        )
        self._heartbeat = start_heartbeats(
            host, probe, _disconnecting(server, probe.run(), "is stuck")
        )

    async def _publish_to_routers(
        self, host: Host, engine: DecodeEngine, server: GenerateServer
    ) -> None:
        """Runs before the worker is registered, since routers may ask as soon as they see it."""
        self._publisher = publisher = KvPublisher(
            host.messaging,
            namespace=self._spec.namespace,
            component=self._spec.component,
            lease_id=host.lease.id,
            load=partial(self._load, engine, server),
            holdings=engine.kv_events,
            on_drop=host.drops,
        )
        await self._stack.enter_async_context(publisher.serve())
        host.spawn(publisher.run(), "kv-notices")
        if engine.kv_events is not None:
            host.spawn(_publish_changes(engine.kv_events, publisher), "kv-events")

    async def _stop_remote_prefills(self, host: Host, engine: DecodeEngine) -> None:
        """Orders the engine to stop asking for remote prefills. The engine cannot derive that
        from missing keys, because the store may have lost them."""
        if engine.metadata is None:
            return
        subject = names.leave_subject(self._spec.namespace, engine.metadata.engine_id)
        for _ in range(_LEAVE_TRIES):
            try:
                leave = encode(Leave(lease_id=host.lease.id))
                await host.messaging.request(subject, leave, timeout_s=1.0)
                return
            except (DeadlineExceeded, Unavailable) as exc:
                logger.warning(
                    "the engine did not accept the order to stop remote prefills: %s", exc
                )

    async def _register(self, host: Host, engine: DecodeEngine, server: GenerateServer) -> None:
        """Publishes the metadata, then registers the worker: other processes may write into its
        blocks as soon as they see the worker."""
        namespace, lease = self._spec.namespace, host.lease
        if engine.metadata is not None:
            engine_id = engine.metadata.engine_id
            first_token = names.first_token_subject(namespace, engine_id)
            on_first_token = counted(self._on_first_token, "first_token", host.drops)
            await self._stack.enter_async_context(host.messaging.serve(first_token, on_first_token))
            key = names.nixl_metadata_key(namespace, engine_id)
            await host.keys.hold(key, encode_engine(engine.metadata))
        name = self._spec.component
        model = engine.model
        metrics = names.endpoint_subject(namespace, name, "load_metrics", lease.id)
        await self._stack.enter_async_context(host.messaging.serve(metrics, self._load_metrics))
        await host.register("load_metrics", model=model)
        await host.register(
            "generate",
            stream=server.stream_address,
            tls=host.own_certificates is not None,
            model=model,
        )

    async def _on_first_token(self, payload: bytes) -> None:
        assert self._engine is not None
        delta = self._engine.first_token(decode_first_token(payload))
        if delta is not None:
            self._send([delta])

    async def _load_metrics(self, _payload: bytes) -> bytes:
        """The fields of `Load`, as msgpack."""
        assert self._engine is not None and self._server is not None
        return msgspec.msgpack.encode(
            msgspec.structs.asdict(self._load(self._engine, self._server))
        )

    def _load(self, engine: DecodeEngine, server: GenerateServer) -> Load:
        load = engine.load
        return Load(
            running=load.running,
            waiting=load.waiting,
            kv_usage=min(max(load.kv_usage, 0.0), 1.0),
            prefill_tokens=server.waiting_tokens,
        )

    async def _deliver(self, engine: DecodeEngine) -> None:
        async for deltas in engine.steps():
            self._send(deltas)

    def _send(self, deltas: list[TokenDelta]) -> None:
        """Sends deltas to the Frontends."""
        assert self._server is not None
        if self._traced is not None:
            self._traced.delivered(deltas)
        self._server.deliver(deltas)
        if self._publisher is not None:
            self._publisher.load_changed()


async def _disconnecting(
    server: GenerateServer, work: Coroutine[Any, Any, None], what: str
) -> None:
    """Until the engine has failed: then all Frontends hear of it at once."""
    try:
        await work
    except EngineDied:
        server.disconnect_all(f"the worker's engine {what}")
        raise


async def _publish_changes(events: KvEvents, publisher: KvPublisher) -> None:
    async for changes in events.changes():
        publisher.changed(changes)
