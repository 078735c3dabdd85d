"""The decode worker: takes requests, and keeps each until its end."""

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from dynamo_lite.disagg.engine import KvEvents
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode, encode_json
from dynamo_lite.protocol.errors import DeadlineExceeded, EngineDied, Unavailable
from dynamo_lite.protocol.health import EngineStatus, Leave
from dynamo_lite.protocol.kv import Load
from dynamo_lite.protocol.live_options import applied
from dynamo_lite.protocol.prefill import decode_first_token
from dynamo_lite.request_plane.server import GenerateServer
from dynamo_lite.routing.kv_publisher import KvPublisher
from dynamo_lite.runtime.drops import counted
from dynamo_lite.runtime.process.component import Host, ProcessSpec
from dynamo_lite.serve.services.config import VllmWorkerConfig
from dynamo_lite.serve.services.engine_probe import EngineProbe
from dynamo_lite.serve.services.metrics import DECODE_GAUGES, status_gauges
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
        self._parts = parts or VllmBackend(spec)
        self._stack = AsyncExitStack()
        #: Requests that its drain did not finish.
        self._cut_off = 0
        #: Leases of the prefill workers that may write into its blocks.
        self._writers: list[int] = []

    async def start(self, host: Host) -> dict[str, Any]:
        await self._parts.prepare()
        host.progress("loading the model")
        config, enter = self._config, self._stack.enter_async_context
        self._host = host
        self._engine = engine = await enter(self._parts.open_decode_engine(host, config))
        self._server = server = await enter(
            GenerateServer(
                engine,
                host.spec.bind_host,
                limits=config,
                on_drop=host.drops,
                certificates=host.own_certificates,
            )
        )
        await enter(host.live_options(config, lambda values: server.limit(applied(values, config))))
        # The engine reports nothing without remote prefills.
        self._show = status_gauges(host.registry, DECODE_GAUGES) if engine.metadata else None
        self._probe = probe = EngineProbe(
            host,
            engine,
            # A request whose adapter is being loaded gives the engine nothing to do.
            busy=lambda: server.in_engine > 0,
            step_timeout_s=config.step_timeout_s,
            on_status=self._on_status,
        )
        self._stack.callback(probe.close)
        host.spawn(self._or_disconnect(self._deliver(), "died"), "engine-steps")
        if config.kv_events:
            await self._publish_to_routers()
        await self._register()
        self._heartbeat = probe.start(self._or_disconnect(probe.run(), "is stuck"))
        return {"model": engine.model}

    async def drain(self, grace_s: float) -> None:
        """Finishes its requests. Prompts that wait for an unclaimed remote prefill are prefilled
        locally."""
        self._heartbeat.cancel()
        server = self._server
        server.refuse_new("this worker is draining")
        logger.info("draining: %d requests in flight are finished", server.in_flight)
        await asyncio.gather(*(self._leave(each.engine_id) for each in self._engine.metadata))
        if not await server.wait_idle(grace_s):
            self._cut_off = server.in_flight
            logger.warning(
                "drain timeout after %g s: %d requests are still in flight", grace_s, self._cut_off
            )

    async def close(self) -> None:
        await self._stack.aclose()

    def health(self) -> Mapping[str, Any]:
        probe, load, metadata = self._probe, self._engine.load, self._engine.metadata
        facts: dict[str, Any] = {
            **probe.facts(),
            "in_flight": self._server.in_flight,
            "cut_off": self._cut_off,
            "running": load.running,
            "waiting": load.waiting,
            "kv_usage": load.kv_usage,
            "max_running": load.max_running,
        }
        if not metadata:
            return facts | {"writers": [], "writers_age_s": 0.0}
        if (asked_at := probe.asked_at) is None:
            return facts
        age_s = self._host.clock.monotonic() - asked_at
        return facts | {"writers": [f"{w:x}" for w in self._writers], "writers_age_s": age_s}

    def _on_status(self, status: EngineStatus) -> None:
        self._writers = status.writers
        if self._show is not None:
            self._show(status)

    async def _publish_to_routers(self) -> None:
        """Runs before the worker is registered, since routers may ask as soon as they see it."""
        host, events = self._host, self._engine.kv_events
        publisher = KvPublisher(
            host.messaging,
            namespace=host.spec.namespace,
            component=host.spec.component,
            lease_id=host.lease.id,
            load=self._load,
            holdings=events,
            on_drop=host.drops,
        )
        await self._stack.enter_async_context(publisher.serve())
        host.spawn(publisher.run(), "kv-notices")
        if events is not None:
            host.spawn(_publish_changes(events, publisher), "kv-events")

    async def _leave(self, engine_id: str) -> None:
        """Orders an engine to stop asking for remote prefills. It cannot derive that from missing
        keys, because the store may have lost them."""
        host = self._host
        subject = names.leave_subject(host.spec.namespace, engine_id)
        for _ in range(_LEAVE_TRIES):
            try:
                leave = encode(Leave(lease_id=host.lease.id))
                await host.messaging.request(subject, leave, timeout_s=1.0)
                return
            except (DeadlineExceeded, Unavailable) as exc:
                logger.warning(
                    "the engine did not accept the order to stop remote prefills: %s", exc
                )

    async def _register(self) -> None:
        """Publishes the metadata, then registers the worker: other processes may write into its
        blocks as soon as they see the worker."""
        host, engine, enter = self._host, self._engine, self._stack.enter_async_context
        namespace, component = host.spec.namespace, host.spec.component
        on_first_token = counted(self.on_first_token, "first_token", host.drops)
        for metadata in engine.metadata:
            first_token = names.first_token_subject(namespace, metadata.engine_id)
            await enter(host.messaging.serve(first_token, on_first_token))
            key = names.nixl_metadata_key(namespace, metadata.engine_id)
            await host.keys.hold(key, encode_json(metadata))
        metrics = names.endpoint_subject(namespace, component, "load_metrics", host.lease.id)
        await enter(host.messaging.serve(metrics, self._load_metrics))
        await host.register("load_metrics", model=engine.model)
        await host.register(
            "generate",
            stream=self._server.stream_address,
            tls=host.own_certificates is not None,
            model=engine.model,
        )

    async def on_first_token(self, payload: bytes) -> None:
        delta = self._engine.first_token(decode_first_token(payload))
        if delta is not None:
            self._server.deliver([delta])

    async def _load_metrics(self, _payload: bytes) -> bytes:
        """The fields of `Load`, as msgpack."""
        return msgspec.msgpack.encode(msgspec.structs.asdict(self._load()))

    def _load(self) -> Load:
        load = self._engine.load
        return Load(
            running=load.running,
            waiting=load.waiting,
            kv_usage=min(max(load.kv_usage, 0.0), 1.0),
            prefill_tokens=self._server.waiting_tokens,
        )

    async def _deliver(self) -> None:
        async for deltas in self._engine.steps():
            self._server.deliver(deltas)

    async def _or_disconnect(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """Until the engine has failed: then all Frontends hear of it at once."""
        try:
            await work
        except EngineDied:
            self._server.disconnect_all(f"the worker's engine {what}")
            raise


async def _publish_changes(events: KvEvents, publisher: KvPublisher) -> None:
    async for changes in events.changes():
        publisher.changed(changes)
