"""A simulated decode and prefill engine with its jobs, over the memory twins, in virtual time."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

from prometheus_client import CollectorRegistry

from dynamo_lite.disagg.counters import DROPPED
from dynamo_lite.disagg.engine_config import DecodeEngineConfig, PrefillEngineConfig
from dynamo_lite.disagg.prefill.attempt import WriterParts
from dynamo_lite.disagg.prefill.jobs import PrefillJobs
from dynamo_lite.disagg.prefill.peer_links import PeerLink
from dynamo_lite.disagg.queue.base import QueueConfig
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode, encode_json
from dynamo_lite.protocol.generate import GenerateRequest
from dynamo_lite.protocol.kv_regions import decode_engine
from dynamo_lite.protocol.options import DisaggOptions
from dynamo_lite.runtime.claim_cells import ClaimCells
from dynamo_lite.runtime.clock import Clock
from dynamo_lite.runtime.members.health import publish_heartbeats
from tests.builders import endpoint_record, engine_config, register
from tests.simulation.engine.assembly import EngineSetup, SimEngineProcess, SimModelConfig
from tests.simulation.engine.engine import SimEngine
from tests.simulation.engine.model import Sampling
from tests.simulation.engine.mover import Fabric, Wire
from tests.simulation.loop.loop import VirtualLoop
from tests.simulation.shipped import Shipped
from tests.twins.queue import MemoryBroker, MemoryQueue
from tests.twins.servers import MemoryMessaging, MemoryStore

QUEUE = QueueConfig()


class Servers:
    """Implements ServerClients."""

    def __init__(self, clock: Clock):
        self._messaging, self._store = MemoryMessaging(), MemoryStore(clock=clock.monotonic)
        self._broker = MemoryBroker()

    def messaging(self) -> MemoryMessaging:
        return self._messaging

    def store(self) -> MemoryStore:
        return self._store

    def queue(self, config: QueueConfig) -> MemoryQueue:
        return MemoryQueue(self._broker, stream="jobs", subject="jobs", config=config)


class _Links:
    """Of a prefill engine whose links all work."""

    def __init__(self, store: MemoryStore, engine: SimEngine):
        self._store, self._engine = store, engine
        self.known: dict[str, PeerLink] = {}

    async def look_up(self, engine_id: str) -> PeerLink | None:
        raw = await self._store.get(names.nixl_metadata_key("t", engine_id))
        if raw is None:
            return None
        link = PeerLink(decode_engine(raw))
        link.reads = self._engine.check_peer(link.target)
        return link


class Task:
    """An engine's process: a task."""

    def __init__(self, main: Coroutine[Any, Any, None], on_end: Callable[[], None]):
        self.task = asyncio.create_task(main)
        self.task.add_done_callback(lambda _: on_end())

    def kill(self) -> None:
        self.task.cancel()


class Pair:
    """A decode engine, and a prefill engine with its jobs. runners: how many jobs at a time."""

    runners = 2

    def __init__(self, stack: AsyncExitStack, wire: Wire, **config: Any):
        self.stack = stack
        loop = asyncio.get_running_loop()
        self.clock = Clock(monotonic=loop.time, wall=loop.time, boottime=loop.time)
        self.servers = Servers(self.clock)
        self.fabric = Fabric(random.Random(1), wire)
        self.config = SimModelConfig(**config)
        self.engines: dict[str, SimEngineProcess] = {}
        self.counts: dict[str, Any] = {}
        self.got: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.drops: Counter[str] = Counter()
        # One more, for a job that a test runs itself.
        self.cells = ClaimCells(self.runners + 1)

    def start_engine(
        self, engine: SimEngineProcess, main: Coroutine[Any, Any, None], on_end: Callable[[], None]
    ) -> Task:
        self.engines[engine.setup.address] = engine
        return Task(main, on_end)

    def _count(self, counts: dict[str, Any]) -> None:
        for name, value in counts.items():
            if name.startswith(f"{DROPPED}/"):
                self.drops[name.partition("/")[2]] += value
            elif isinstance(value, list):
                self.counts.setdefault(name, []).extend(value)
            else:
                self.counts[name] = self.counts.get(name, 0) + value

    async def engine(self, name: str, role: DecodeEngineConfig | PrefillEngineConfig) -> SimEngine:
        engine_id = f"00000000-0000-4000-8000-{len(name):012x}"
        setup = EngineSetup(
            config=self.config,
            engine_config=engine_config(role, engine_id=engine_id, lease_id=len(name)),
            clients=self.servers,
            fabric=self.fabric,
            address=name,
            clock=self.clock,
            rng=random.Random(name),
            until=self.cells.read,
        )
        return await self.stack.enter_async_context(
            SimEngine(
                setup,
                start_engine=self.start_engine,
                shipped=Shipped(),
                messaging=self.servers.messaging(),
                on_counts=self._count,
            )
        )

    async def start(self) -> None:
        store = self.servers.store()
        await register(store, endpoint_record(2, "PrefillWorker", "prefill"))
        role = DecodeEngineConfig(
            options=DisaggOptions(
                max_local_prefill_length=12, remote_prefill_timeout_s=10.0, max_queue_wait_s=10.0
            ),
            prefill_component="PrefillWorker",
            queue=QUEUE,
        )
        self.decode = await self.engine("decode", role)
        [metadata] = self.decode.metadata
        key = names.nixl_metadata_key("t", metadata.engine_id)
        await store.put(key, encode_json(metadata))
        role = PrefillEngineConfig(cells_path="", min_prefix_read_length=4, queue=QUEUE)
        self.prefill = await self.engine("prefill", role)
        parts = WriterParts(
            namespace="t",
            lease_id=2,
            engine=self.prefill,
            cells=self.cells,
            links=_Links(store, self.prefill),  # type: ignore[arg-type]
            messaging=self.servers.messaging(),
            clock=self.clock,
            on_drop=self._drop,
        )
        queue = await self.stack.enter_async_context(self.servers.queue(QUEUE))
        self.jobs = PrefillJobs(parts, queue, CollectorRegistry())
        beat = publish_heartbeats(
            self.servers.messaging(),
            namespace="t",
            component="PrefillWorker",
            lease_id=2,
            verdict=lambda: (True, ""),
        )
        jobs = [self.jobs.run() for _ in range(self.runners)]
        works = (self._read(), self.prefill.run_prefills(lambda *_: None), *jobs, beat)
        self.driving = [asyncio.create_task(work) for work in works]
        for task in self.driving:
            self.stack.push_async_callback(_end, task)
        await asyncio.sleep(1.0)

    def _drop(self, where: str) -> None:
        self.drops[where] += 1

    async def _read(self) -> None:
        async for deltas in self.decode.steps():
            for delta in deltas:
                self.got.setdefault(delta.request_id, []).extend(delta.token_ids)
                if delta.finish_reason:
                    self.ended[delta.request_id] = delta.finish_reason

    async def submit(self, name: str, prompt: list[int], sampling: Sampling, **more: Any) -> None:
        await self.decode.submit(
            GenerateRequest(
                request_id=name,
                prompt_token_ids=prompt,
                sampling=encode(sampling),
                arrival_time=0.0,
                **more,
            )
        )

    async def until(self, condition: Callable[[], bool], limit_s: float = 60.0) -> None:
        async with asyncio.timeout(limit_s):
            while not condition():
                await asyncio.sleep(0.05)

    async def idle(self) -> None:
        """Returns when nothing is under way. Every block of both pools is free then."""
        await self.until(lambda: not any(e.scheduler.has_work for e in self.engines.values()))
        await self.until(lambda: not self.jobs.working)
        for engine in self.engines.values():
            assert engine.pool.taken() == []


async def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def play(script: Callable[[Pair], Coroutine[Any, Any, None]], wire: Wire, **config: Any) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            pair = Pair(stack, wire, **config)
            await pair.start()
            await script(pair)

    with VirtualLoop(7) as loop:
        loop.run_until_complete(main())
        assert loop.failures == []


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(count)]


GREEDY = Sampling(max_tokens=8)
