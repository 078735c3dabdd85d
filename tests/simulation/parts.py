"""The environment of the shipped components in a simulation: engines, clients, clocks."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from prometheus_client import CollectorRegistry

from dynamo_lite.disagg.engine_config import (
    DecodeEngineConfig,
    EngineConfig,
    PrefillEngineConfig,
)
from dynamo_lite.disagg.metrics import RemotePrefillMetrics
from dynamo_lite.protocol import names
from dynamo_lite.queue.base import Job, PrefillQueue, QueueConfig, QueueOptions
from dynamo_lite.queue.jetstream import JetStreamQueue
from dynamo_lite.runtime.clock import Clock
from dynamo_lite.runtime.drops import OnDrop
from dynamo_lite.runtime.fence import Fence
from dynamo_lite.runtime.messaging import Handler, Messaging
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.runtime.permits import always_granted, no_grant
from dynamo_lite.runtime.process.component import Host, ProcessSpec
from dynamo_lite.runtime.process.host import Health, ProcessEnvironment, Status
from dynamo_lite.runtime.store import Store
from dynamo_lite.services.config import PrefillWorkerConfig, VllmWorkerConfig
from dynamo_lite.services.vllm_backend import decode_role, prefill_role
from tests.simulation.engine.assembly import EngineSetup
from tests.simulation.engine.core import SimModelConfig
from tests.simulation.engine.engine import SimEngine
from tests.simulation.engine.mover import Fabric
from tests.simulation.intruder import Intruder
from tests.simulation.invariants import Judge
from tests.simulation.loop.process import SimProcess
from tests.simulation.network.network import Network
from tests.simulation.servers.fence import MemoryFence
from tests.simulation.servers.nats_server import URL
from tests.simulation.shipped import Shipped
from tests.simulation.status import SimStatus
from tests.simulation.supervisor import Slot

#: Takes a subject and a payload.
Hear = Callable[[str, bytes], None]

#: Opens the store for the running process.
OpenStore = Callable[[], AbstractAsyncContextManager[Store]]

#: How long a component's imports take.
_IMPORTS_S = 0.05


@dataclass(frozen=True)
class SimClients:
    """Implements ServerClients in the process that opens them."""

    network: Network
    open_store: OpenStore
    namespace: str
    clock: Clock
    queue_client: type[JetStreamQueue] = JetStreamQueue

    def messaging(self) -> AbstractAsyncContextManager[Messaging]:
        return NatsMessaging(URL)

    def store(self) -> AbstractAsyncContextManager[Store]:
        return self.open_store()

    def queue(self, config: QueueConfig) -> AbstractAsyncContextManager[PrefillQueue]:
        return self.queue_client(
            URL,
            stream=names.prefill_stream(self.namespace),
            subject=names.prefill_jobs_subject(self.namespace),
            config=config,
            wall=self.clock.wall,
        )


class Pulls:
    """A worker's queue that reports pulled jobs and their ends to the judge."""

    def __init__(
        self,
        opened: AbstractAsyncContextManager[PrefillQueue],
        judge: Judge,
        lease_id: int,
        intruder: Intruder | None,
    ):
        self._opened, self._judge, self._lease_id = opened, judge, lease_id
        self._intruder = intruder
        self._held: set[Job] = set()

    async def __aenter__(self) -> PrefillQueue:
        queue = await self._opened.__aenter__()
        pull = queue.pull

        async def watched(**wanted: Any) -> Job | None:
            job = await pull(**wanted)
            if job is not None:
                self._judge.pulled(job)
                if self._intruder is not None:
                    self._intruder.pulled(job)
                self._watch(job)
                self._held.add(job)
                self._judge.jobs_held(len(self._held), self._lease_id)
            return job

        queue.pull = watched
        return queue

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._opened.__aexit__(*exc_info)

    def _watch(self, job: Any) -> None:
        ack, nak, term = job.ack, job.nak, job.term

        async def watched_ack() -> None:
            self._held.discard(job)
            self._judge.job_ended(job, self._lease_id)
            await ack()

        async def watched_nak(*, delay_s: float = 0.0) -> None:
            self._held.discard(job)
            await nak(delay_s=delay_s)

        async def watched_term() -> None:
            self._held.discard(job)
            self._judge.job_ended(job, self._lease_id)
            await term()

        job.ack, job.nak, job.term = watched_ack, watched_nak, watched_term


@dataclass(frozen=True, kw_only=True)
class SimParts:
    """Implements WorkerBackend for one incarnation of a worker."""

    network: Network
    open_store: OpenStore
    fabric: Fabric
    judge: Judge
    shipped: Shipped
    model: SimModelConfig
    slot: Slot
    process: SimProcess
    rng: random.Random
    intruder: Intruder | None = None

    async def prepare(self) -> None:
        await asyncio.sleep(_IMPORTS_S)

    def open_fence(self, host: Host, config: PrefillWorkerConfig) -> MemoryFence:
        return MemoryFence(self.process.clock.boottime, config.most_jobs)

    def open_queue(
        self, host: Host, options: QueueOptions
    ) -> AbstractAsyncContextManager[PrefillQueue]:
        clients = replace(self._clients(host.spec), queue_client=self.shipped.queue_client)
        opened = clients.queue(QueueConfig.of(options))
        return self.shipped.queue(Pulls(opened, self.judge, host.lease.id, self.intruder))

    def open_decode_engine(self, host: Host, config: VllmWorkerConfig) -> SimEngine:
        return self._engine(host, decode_role(config, host.spec.component), None)

    def open_prefill_engine(
        self, host: Host, config: PrefillWorkerConfig, fence: Fence
    ) -> SimEngine:
        assert isinstance(fence, MemoryFence)
        return self._engine(host, prefill_role(config, fence_path=""), fence)

    def _clients(self, spec: ProcessSpec) -> SimClients:
        return SimClients(self.network, self.open_store, spec.namespace, self.process.clock)

    def _engine(
        self, host: Host, role: DecodeEngineConfig | PrefillEngineConfig, fence: MemoryFence | None
    ) -> SimEngine:
        spec = host.spec
        engine_config = EngineConfig(
            namespace=spec.namespace,
            engine_id=_uuid(self.rng),
            lease_id=host.lease.id,
            lease_ttl_s=spec.lease_ttl_s,
            nats_url=spec.nats_url,
            etcd_url=spec.etcd_url,
            role=role,
        )
        setup = EngineSetup(
            config=self.model,
            engine_config=engine_config,
            clients=self._clients(spec),
            fabric=self.fabric,
            address=self.slot.name,
            clock=self.process.clock,
            rng=self.rng,
            alive=fence.open if fence is not None else lambda: True,
            verdict=fence.verdict if fence is not None else always_granted,
            grant_of=fence.grant_of if fence is not None else no_grant,
        )
        # A planner reads them.
        metrics = RemotePrefillMetrics(host.registry) if self.model.tells_load else None

        def count(counts: dict[str, Any]) -> None:
            self.judge.count_engine(counts)
            if metrics is not None:
                metrics.apply(counts)

        return SimEngine(
            setup,
            home=self.slot,
            assembly=self.shipped,
            messaging=host.messaging,
            on_counts=count,
        )


class _HeardMessaging(NatsMessaging):
    """Messaging that calls `hear` with each message before its handler, and `said` with each
    message after it was published. An intruder may answer requests first."""

    def __init__(
        self, url: str, hear: Hear, said: Hear, on_drop: OnDrop, intruder: Intruder | None
    ):
        super().__init__(url, on_drop=on_drop)
        self._hear, self._said, self._intruder = hear, said, intruder

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        intruder = self._intruder
        if intruder is not None and (answer := intruder.answer(subject)) is not None:
            return answer
        reply = await super().request(subject, payload, timeout_s=timeout_s)
        if intruder is not None:
            intruder.answered(subject, payload, reply)
        return reply

    async def publish(self, subject: str, payload: bytes) -> None:
        await super().publish(subject, payload)
        self._said(subject, payload)

    @asynccontextmanager
    async def serve(self, subject: str, handler: Handler) -> AsyncIterator[None]:
        async def heard(payload: bytes) -> bytes | None:
            self._hear(subject, payload)
            return await handler(payload)

        async with super().serve(subject, heard):
            yield


class _NoStatus:
    url = "http://nowhere"


def surroundings(
    network: Network,
    process: SimProcess,
    open_store: OpenStore,
    hear: Hear,
    said: Hear,
    intruder: Intruder | None,
    *,
    with_status: bool,
) -> ProcessEnvironment:
    """hear: called with each message before its handler. said: with each published message.
    with_status: whether the process serves /health and /metrics."""

    @asynccontextmanager
    async def status(
        _: ProcessSpec, health: Health, _probes: Any, registry: CollectorRegistry, _on_drop: OnDrop
    ) -> AsyncIterator[Status]:
        if not with_status:
            yield _NoStatus()
            return
        async with SimStatus(process.host, health, registry) as served:
            yield served

    def store(_: ProcessSpec) -> AbstractAsyncContextManager[Store]:
        return open_store()

    def open_messaging(
        spec: ProcessSpec, on_drop: OnDrop
    ) -> AbstractAsyncContextManager[Messaging]:
        return _HeardMessaging(spec.nats_url, hear, said, on_drop, intruder)

    return ProcessEnvironment(
        open_store=store,
        open_messaging=open_messaging,
        open_status=status,
        clock=process.clock,
    )


def _uuid(rng: random.Random) -> str:
    digits = f"{rng.getrandbits(128):032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
