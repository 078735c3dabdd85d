"""The decode worker: takes requests, and keeps each until its end."""

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from typing import Any

import msgspec

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode, encode_json
from dynamo_lite.protocol.errors import DeadlineExceeded, EngineDied, Unavailable
from dynamo_lite.protocol.health import Leave
from dynamo_lite.protocol.kv import Load
from dynamo_lite.protocol.live_options import applied
from dynamo_lite.request_plane.server import GenerateServer
from dynamo_lite.routing.kv_publisher import KvPublisher
from dynamo_lite.runtime.drops import counted
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.serve.services.config import VllmWorkerConfig
from dynamo_lite.serve.services.decode_outputs import DecodeOutputs, publish_changes
from dynamo_lite.serve.services.engine_probe import EngineProbe
from dynamo_lite.serve.services.metrics import DECODE_GAUGES
from dynamo_lite.serve.services.vllm_backend import VllmBackend

logger = logging.getLogger(__name__)

_LEAVE_TRIES = 3


class VllmWorker:
    def __init__(
        self, config: Mapping[str, Any] | VllmWorkerConfig, parts: VllmBackend | None = None
    ):
        self._config = msgspec.convert(config, VllmWorkerConfig)
        self._parts = parts or VllmBackend()
        #: Requests that its drain did not finish.
        self._cut_off = 0

    async def start(self, host: Host) -> dict[str, Any]:
        await self._parts.prepare()
        host.progress("loading the model")
        config, enter = self._config, host.stack.enter_async_context
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
        self._probe = probe = EngineProbe(
            host,
            engine,
            # A request whose adapter is being loaded gives the engine nothing to do.
            busy=lambda: server.in_engine > 0,
            step_timeout_s=config.step_timeout_s,
            gauges=DECODE_GAUGES,
        )
        publisher = await self._open_publisher() if config.kv_events else None
        outputs = DecodeOutputs(engine, server, publisher)
        host.spawn(self._or_disconnect(outputs.send_steps(), "died"), "engine-steps")
        await self._register(outputs)
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
        if probe.status is None:
            return facts
        # The prefill workers that may write into its blocks, by their leases.
        writers = [f"{lease_id:x}" for lease_id in probe.status.writers]
        age_s = self._host.clock.monotonic() - probe.asked_at
        return facts | {"writers": writers, "writers_age_s": age_s}

    async def _open_publisher(self) -> KvPublisher:
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
        await host.stack.enter_async_context(publisher.serve())
        host.spawn(publisher.run(), "kv-notices")
        if events is not None:
            host.spawn(publish_changes(events, publisher), "kv-events")
        return publisher

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

    async def _register(self, outputs: DecodeOutputs) -> None:
        """Publishes the metadata, then registers the worker: other processes may write into its
        blocks as soon as they see the worker."""
        host, engine, enter = self._host, self._engine, self._host.stack.enter_async_context
        namespace, component = host.spec.namespace, host.spec.component
        on_first_token = counted(outputs.on_first_token, "first_token", host.drops)
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

    async def _or_disconnect(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """Until the engine has failed: then all Frontends hear of it at once."""
        try:
            await work
        except EngineDied:
            self._server.disconnect_all(f"the worker's engine {what}")
            raise
