"""Beats and who is judged by them, on every messaging."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.health import Heartbeat
from dynamo_lite.protocol.names import endpoint_key, endpoint_prefix, health_subject
from dynamo_lite.runtime.members import health
from dynamo_lite.runtime.members.health import HealthMonitor
from dynamo_lite.runtime.members.heartbeat import publish_heartbeats
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.messaging import Messaging
from tests.builders import endpoint_record, eventually, members_when, register
from tests.twins.servers import MemoryMessaging, MemoryStore
from tests.unit.virtual import virtual

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

A, B = 0xA, 0xB


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything ten times as fast."""
    monkeypatch.setattr(health, "SILENT_S", 0.4)
    monkeypatch.setattr(health, "SECOND_LOOK_S", 0.1)
    monkeypatch.setattr(health, "_LOOK_S", 0.02)
    monkeypatch.setattr("dynamo_lite.runtime.members.heartbeat.HEARTBEAT_PERIOD_S", 0.05)


class Graph:
    """A roster in a store of its own, and a monitor of its members."""

    def __init__(self, messaging: Messaging):
        self.messaging, self.namespace = messaging, f"t-{secrets.token_hex(3)}"
        self.store, self.registry = MemoryStore(), CollectorRegistry()
        self.drops: list[str] = []
        self.turned: asyncio.Queue[tuple[set[int], set[int]]] = asyncio.Queue()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator["Graph"]:
        prefix = endpoint_prefix(self.namespace, "Worker", "generate")
        async with (
            Roster(self.store, prefix) as self.roster,
            HealthMonitor(
                self.messaging,
                self.roster,
                namespace=self.namespace,
                component="Worker",
                registry=self.registry,
                on_drop=self.drops.append,
            ) as self.monitor,
        ):
            self.monitor.on_change(
                lambda back, lost: self.turned.put_nowait((set(back), set(lost)))
            )
            yield self

    async def join(self, lease_id: int) -> None:
        await register(self.store, endpoint_record(lease_id, "Worker", namespace=self.namespace))
        await members_when(self.roster, lambda ms: any(m.lease_id == lease_id for m in ms), 5)

    async def leave(self, lease_id: int) -> None:
        await self.store.delete(endpoint_key(self.namespace, "Worker", "generate", lease_id))
        await members_when(self.roster, lambda ms: all(m.lease_id != lease_id for m in ms), 5)

    def worker(
        self, lease_id: int, verdict: Callable[[], tuple[bool, str]] = lambda: (True, "")
    ) -> Coroutine[Any, Any, None]:
        return publish_heartbeats(
            self.messaging,
            namespace=self.namespace,
            component="Worker",
            lease_id=lease_id,
            verdict=verdict,
        )

    @contextlib.asynccontextmanager
    async def beating(self, lease_id: int) -> AsyncIterator[None]:
        task = asyncio.create_task(self.worker(lease_id))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def beat(self, lease_id: int, number: int, *, ok: bool = True) -> None:
        beat = Heartbeat(lease_id=lease_id, number=number, ok=ok)
        await self.send(encode(beat))

    async def send(self, payload: bytes) -> None:
        await self.messaging.publish(health_subject(self.namespace, "Worker"), payload)

    async def hear(self, beats: int) -> None:
        """Returns when this many more heartbeats have come, of any worker."""
        heard = asyncio.Semaphore(0)

        async def on_beat(_payload: bytes) -> None:
            heard.release()

        subject = health_subject(self.namespace, "Worker")
        async with asyncio.timeout(10), self.messaging.serve(subject, on_beat):
            for _ in range(beats):
                await heard.acquire()

    async def next_turn(self) -> tuple[set[int], set[int]]:
        async with asyncio.timeout(5):
            return await self.turned.get()

    async def dropped(self, count: int) -> None:
        """Returns when so many malformed ones are counted: those sent before have come, too."""
        await eventually(lambda: self.drops == count * ["beat"], 5)

    def sample(self, name: str) -> float | None:
        return self.registry.get_sample_value(name)

    def responsive(self) -> list[int]:
        return [member.lease_id for member in self.monitor.responsive]


@pytest.fixture
async def graph(messaging: Messaging) -> AsyncIterator[Graph]:
    async with Graph(messaging).open() as graph:
        yield graph


async def test_who_joins_is_trusted_and_who_falls_silent_is_not(graph: Graph) -> None:
    loop = asyncio.get_running_loop()
    # Taken before A joins: the monitor counts from when it sees A, which is during the join.
    joins = loop.time()
    await graph.join(A)
    await graph.join(B)
    assert graph.responsive() == [A, B]
    async with graph.beating(B):
        assert await graph.next_turn() == (set(), {A})
        assert 0.4 <= loop.time() - joins < 2.0
        assert graph.responsive() == [B]
        assert [m.lease_id for m in graph.monitor.members_or_all] == [B]
        assert graph.monitor.silent_for(A) >= 0.4 > graph.monitor.silent_for(B)
        assert graph.monitor.trouble(A).startswith("no heartbeat for 0.")
        assert graph.monitor.trouble(B) == ""
        assert graph.sample("dynamo_lite_workers_unresponsive") == 1
    assert await graph.next_turn() == (set(), {B})
    assert graph.responsive() == []
    assert [m.lease_id for m in graph.monitor.members_or_all] == [A, B]


async def test_a_silent_one_is_back_with_its_next_good_beat(graph: Graph) -> None:
    await graph.join(A)
    assert await graph.next_turn() == (set(), {A})
    assert graph.responsive() == []
    async with graph.beating(A):
        assert await graph.next_turn() == ({A}, set())
        assert graph.responsive() == [A]
        assert graph.sample("dynamo_lite_workers_unresponsive") == 0
    assert await graph.next_turn() == (set(), {A})


async def test_who_says_that_it_cannot_work_is_believed_at_once(graph: Graph) -> None:
    await graph.join(A)
    verdict = (True, "")
    worker = graph.worker(A, lambda: verdict)
    task = asyncio.create_task(worker)
    verdict = (False, "the engine is stuck " + "x" * 1000)
    assert await graph.next_turn() == (set(), {A})
    assert graph.monitor.trouble(A).startswith("the engine is stuck")
    before = graph.monitor.silent_for(A)
    await eventually(lambda: graph.monitor.silent_for(A) >= before + 0.09)
    verdict = (True, "")
    assert await graph.next_turn() == ({A}, set())
    task.cancel()
    await asyncio.wait([task], timeout=5)


async def test_another_sign_of_life_ends_a_silence_but_heals_no_worker(graph: Graph) -> None:
    await graph.join(A)
    assert await graph.next_turn() == (set(), {A})
    graph.monitor.shows_life(A)
    assert await graph.next_turn() == ({A}, set())
    assert await graph.next_turn() == (set(), {A}), "one sign is not enough for long"
    await graph.beat(A, 0, ok=False)
    await graph.beat(A, 0)
    await graph.send(b"")
    await graph.dropped(1)
    graph.monitor.shows_life(A)
    assert graph.turned.empty() and graph.responsive() == []


async def test_bad_beats_change_nothing(graph: Graph) -> None:
    await graph.join(A)
    await graph.beat(A, 5, ok=False)
    assert await graph.next_turn() == (set(), {A})
    await graph.beat(A, 5)  # repeated
    await graph.beat(A, 4)  # late
    await graph.beat(B, 0)  # of an unknown member
    await graph.send(b"\xff{")
    await graph.send(encode(Heartbeat(lease_id=A, number=9, ok=True))[:-3])
    await graph.dropped(2)
    assert graph.responsive() == [] and graph.turned.empty()
    await graph.beat(A, 6)
    assert await graph.next_turn() == ({A}, set())


async def test_who_leaves_is_forgotten_and_may_come_back(graph: Graph) -> None:
    await graph.join(A)
    assert await graph.next_turn() == (set(), {A})
    await graph.leave(A)
    assert A not in graph.responsive()
    assert graph.monitor.silent_for(A) == 0.0
    assert graph.sample("dynamo_lite_workers_unresponsive") == 0
    await graph.join(A)
    assert graph.responsive() == [A]


async def test_members_of_before_are_watched_too(messaging: Messaging) -> None:
    graph = Graph(messaging)
    async with graph.open():
        await graph.join(A)
    graph.registry = CollectorRegistry()
    async with graph.open():
        assert graph.responsive() == [A]
        assert await graph.next_turn() == (set(), {A})


@pytest.mark.parametrize("held_up_s", [0.25, 0.35, 0.6])
async def test_a_process_that_was_held_up_listens_before_it_judges(held_up_s: float) -> None:
    """Messages that came while the event loop was blocked are handled before overdue timers. An
    unfounded suspicion changes nothing, so the healthy ones are not looked through again."""
    async with Graph(MemoryMessaging()).open() as graph, graph.beating(A):
        await graph.join(A)
        known = graph.monitor.responsive
        for _ in range(2):
            # Really blocked: a virtual clock would call each timer in its time.
            asyncio.get_running_loop().call_soon(time.sleep, held_up_s)
            await asyncio.sleep(0.02)
        await graph.hear(6)
        assert graph.turned.empty() and graph.monitor.responsive is known
        assert graph.responsive() == [A]


@virtual
async def test_no_worker_is_blamed_for_our_own_outage() -> None:
    messaging = MemoryMessaging()
    async with Graph(messaging).open() as graph, graph.beating(A):
        await graph.join(A)
        await graph.join(B)
        messaging.set_connected(False)
        await asyncio.sleep(0.6)
        assert graph.turned.empty() and graph.responsive() == [A, B]
        messaging.set_connected(True)
        assert await graph.next_turn() == (set(), {B})
        assert graph.responsive() == [A]
