"""The environment of the shipped components in a simulation: options, engines, clients."""

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import msgspec
from prometheus_client import CollectorRegistry, generate_latest

from dynamo_lite.disagg.counters import RemotePrefillMetrics
from dynamo_lite.disagg.engine_config import DecodeEngineConfig, EngineConfig, PrefillEngineConfig
from dynamo_lite.disagg.queue.base import Job, PrefillQueue, QueueConfig, QueueOptions
from dynamo_lite.disagg.queue.jetstream import JetStreamQueue
from dynamo_lite.runtime.claim_cells import ClaimCells, Until
from dynamo_lite.runtime.clock import Clock
from dynamo_lite.runtime.drops import OnDrop
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.runtime.overview.compose import WANTED
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.runtime.process.host import ProcessEnvironment
from dynamo_lite.runtime.store import Store
from dynamo_lite.serve.services.config import PrefillWorkerConfig, VllmWorkerConfig
from dynamo_lite.serve.services.vllm_backend import VllmBackend, decode_role, prefill_role
from tests.simulation.engine.assembly import EngineSetup, SimModelConfig
from tests.simulation.engine.engine import SimEngine
from tests.simulation.loop.process import SimProcess
from tests.simulation.processes import NAMESPACE, Slot
from tests.simulation.scenario import Scenario
from tests.simulation.servers.nats_server import URL

if TYPE_CHECKING:
    from tests.simulation.world import World

_LOCAL_TOKENS, _SHORT_TOKENS = 12, 30
#: One block: every prefix that can be read is read.
_READ_TOKENS = 4


def model_options(scenario: Scenario) -> SimModelConfig:
    return SimModelConfig(
        num_blocks=scenario.num_blocks,
        max_model_len=4 * (scenario.num_blocks - 1),
        token_s=scenario.token_s,
    )


def decode_options(scenario: Scenario) -> dict[str, Any]:
    return msgspec.to_builtins(
        VllmWorkerConfig(
            max_local_prefill_length=_LOCAL_TOKENS,
            remote_prefill_timeout_s=scenario.remote_prefill_timeout_s,
            max_queue_wait_s=scenario.max_queue_wait_s,
            queue=_queue_options(scenario),
            kv_events=False,
        )
    )


def prefill_options(scenario: Scenario) -> dict[str, Any]:
    return msgspec.to_builtins(
        PrefillWorkerConfig(queue=_queue_options(scenario), min_prefix_read_length=_READ_TOKENS)
    )


def _queue_options(scenario: Scenario) -> QueueOptions:
    return QueueOptions(
        max_jobs=scenario.max_jobs,
        short_length=_SHORT_TOKENS,
    )


#: How long a component's imports take.
_IMPORTS_S = 0.05


@dataclass(frozen=True)
class SimClients:
    """Implements ServerClients in the process that opens them."""

    world: "World"
    clock: Clock
    queue_client: type[JetStreamQueue] = JetStreamQueue

    def messaging(self) -> AbstractAsyncContextManager[Messaging]:
        return NatsMessaging(URL)

    def store(self) -> AbstractAsyncContextManager[Store]:
        return self.world.open_store()

    def queue(self, config: QueueConfig) -> AbstractAsyncContextManager[PrefillQueue]:
        return self.queue_client(URL, NAMESPACE, config, wall=self.clock.wall)


class _Pulls:
    """Reports the jobs that a worker has pulled, and their ends, to the judge."""

    def __init__(self, world: "World", lease_id: int):
        self._world, self._judge, self._lease_id = world, world.judge, lease_id
        self._held: set[Job] = set()

    @asynccontextmanager
    async def seen(
        self, opened: AbstractAsyncContextManager[PrefillQueue]
    ) -> AsyncIterator[PrefillQueue]:
        async with opened as queue:
            pull = queue.pull

            async def watched(**wanted: Any) -> Job | None:
                job = await pull(**wanted)
                if job is None:
                    return None
                self._judge.pulled(job)
                if self._world.intruder is not None:
                    self._world.intruder.pulled(job)
                self._watch(job)
                self._held.add(job)
                self._judge.jobs_held(len(self._held), self._lease_id)
                return await self._world.shipped.pulled(job)

            queue.pull = watched
            yield queue

    def _watch(self, job: Any) -> None:
        ack = job.ack

        async def watched_ack() -> None:
            self._ended(job)
            await ack()

        job.ack = watched_ack

    def _ended(self, job: Job) -> None:
        self._held.discard(job)
        self._judge.job_ended(job, self._lease_id)


@dataclass(frozen=True)
class SimParts(VllmBackend):
    """Of one incarnation of a worker."""

    world: "World"
    slot: Slot
    process: SimProcess
    rng: random.Random

    async def prepare(self) -> None:
        await asyncio.sleep(_IMPORTS_S)

    def open_cells(self, host: Host, config: PrefillWorkerConfig) -> ClaimCells:
        return ClaimCells(config.most_jobs)

    def open_queue(
        self, host: Host, options: QueueOptions
    ) -> AbstractAsyncContextManager[PrefillQueue]:
        clients = SimClients(self.world, self.process.clock, self.world.shipped.queue)
        return _Pulls(self.world, host.lease.id).seen(clients.queue(QueueConfig.of(options)))

    def open_decode_engine(self, host: Host, config: VllmWorkerConfig) -> SimEngine:
        return self._engine(host, decode_role(config, host.spec.component))

    def open_prefill_engine(
        self, host: Host, config: PrefillWorkerConfig, cells: ClaimCells
    ) -> SimEngine:
        role = prefill_role(config, cells_path="")
        return self._engine(host, role, until=cells.read)

    def _engine(
        self,
        host: Host,
        role: DecodeEngineConfig | PrefillEngineConfig,
        until: Until = lambda cell: 0.0,
    ) -> SimEngine:
        spec = host.spec
        engine_config = EngineConfig(
            namespace=spec.namespace,
            engine_id=str(uuid.UUID(int=self.rng.getrandbits(128))),
            lease_id=host.lease.id,
            lease_ttl_s=spec.lease_ttl_s,
            nats_url=spec.nats_url,
            etcd_url=spec.etcd_url,
            role=role,
        )
        setup = EngineSetup(
            config=self.world.model,
            engine_config=engine_config,
            clients=SimClients(self.world, self.process.clock),
            fabric=self.world.fabric,
            address=self.slot.name,
            clock=self.process.clock,
            rng=self.rng,
            until=until,
        )
        metrics = RemotePrefillMetrics(host.registry)

        def count(counts: dict[str, Any]) -> None:
            self.world.judge.count_engine(counts)
            metrics.apply(counts)

        return SimEngine(
            setup,
            start_engine=self.slot.start_engine,
            shipped=self.world.shipped,
            messaging=host.messaging,
            on_counts=count,
        )


class _HeardMessaging(NatsMessaging):
    """Tells the judge, and an intruder, what was published, asked and answered."""

    def __init__(self, url: str, world: "World", on_drop: OnDrop):
        super().__init__(url, on_drop=on_drop)
        self._world = world

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        reply = await super().request(subject, payload, timeout_s=timeout_s)
        self._world.judge.answered(subject, payload, reply)
        if self._world.intruder is not None:
            self._world.intruder.answered(subject, payload, reply)
        return reply

    async def publish(self, subject: str, payload: bytes) -> None:
        await super().publish(subject, payload)
        self._world.judge.said(subject, payload)


class SimStatus:
    """The status server of a simulated process, for what a planner asks: /health and /metrics.

    Async context manager. health: makes the facts. Of the metrics there are those that are read.
    """

    def __init__(
        self, host: str, health: Callable[[], dict[str, Any]], registry: CollectorRegistry
    ):
        self._host, self._health, self._registry = host, health, registry
        self._server: asyncio.AbstractServer | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = server = await loop.create_server(
            lambda: _Answers(self._answer), self._host, 0
        )
        self.url = f"http://{self._host}:{server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    def _answer(self, path: bytes) -> bytes | None:
        if path == b"/health":
            return msgspec.json.encode(self._health())
        if path != b"/metrics":
            return None
        return generate_latest(self._registry.restricted_registry(WANTED))


@dataclass
class _Answers(asyncio.Protocol):
    """HTTP/1.0: one request for each connection. answer: the body for a path; None: not found."""

    answer: Callable[[bytes], bytes | None]
    transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        body = self.answer(data.split(b" ", 2)[1])
        head = b"404 Not Found" if body is None else b"200 OK"
        self.transport.write(b"HTTP/1.0 " + head + b"\r\n\r\n" + (body or b""))
        self.transport.close()


def surroundings(world: "World", process: SimProcess) -> ProcessEnvironment:
    return ProcessEnvironment(
        open_store=lambda spec: world.open_store(),
        open_messaging=lambda spec, on_drop: _HeardMessaging(spec.nats_url, world, on_drop),
        open_status=lambda host, health: SimStatus(process.host, health, host.registry),
        clock=process.clock,
    )
