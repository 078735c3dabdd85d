"""Beats and who is judged by them, on every messaging."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.health import Heartbeat
from dynamo_lite.runtime.members import health
from dynamo_lite.runtime.messaging import Messaging
from tests.builders import eventually
from tests.health_graph import A, B, Graph
from tests.twins.servers import MemoryMessaging
from tests.unit.virtual import virtual

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything ten times as fast."""
    monkeypatch.setattr(health, "SILENT_S", 0.4)
    monkeypatch.setattr(health, "SECOND_LOOK_S", 0.1)
    monkeypatch.setattr(health, "_LOOK_S", 0.02)
    monkeypatch.setattr(health, "HEARTBEAT_PERIOD_S", 0.05)


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
        assert graph.monitor.silent_for(A) >= 0.4 > graph.monitor.silent_for(B)
        assert graph.monitor.trouble(A).startswith("no heartbeat for 0.")
        assert graph.monitor.trouble(B) == ""
        assert graph.monitor.trouble(0xBAD) == "it is not registered"
        assert graph.sample("dynamo_lite_workers_unresponsive") == 1
    assert await graph.next_turn() == (set(), {B})
    assert graph.responsive() == []


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
