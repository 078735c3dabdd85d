"""What a worker reports about its engine, and when the engine counts as failed; in virtual
time."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dynamo_lite.disagg.engine import EngineLoad
from dynamo_lite.protocol.errors import EngineDied, StartupError
from dynamo_lite.protocol.health import EngineStatus
from dynamo_lite.runtime.clock import Clock
from dynamo_lite.runtime.tasks import end_tasks
from dynamo_lite.serve.services.engine_probe import EngineProbe
from tests.builders import engine_metadata, loop_time
from tests.twins.servers import MemoryMessaging
from tests.unit.virtual import virtual


class Engine:
    """answers: whether it describes itself; there: whether anybody takes the question."""

    def __init__(self, *, described: bool = True):
        self.metadata = [engine_metadata()] if described else []
        self.load = EngineLoad()
        self.answers, self.there = asyncio.Event(), True
        self.answers.set()
        self.stepped_at = loop_time()

    async def describe(self) -> EngineStatus:
        if not self.there:
            raise StartupError("the engine's process does not answer on NATS")
        await self.answers.wait()
        return EngineStatus(
            metadata=engine_metadata(),
            free_blocks=1,
            total_blocks=8,
            last_step_age_s=loop_time() - self.stepped_at,
        )

    def step(self) -> None:
        self.load, self.stepped_at = EngineLoad(running=1, gave_tokens=True), loop_time()


def host_of(messaging: MemoryMessaging, now: Callable[[], float]) -> Any:
    registry = CollectorRegistry()
    return SimpleNamespace(messaging=messaging, clock=Clock(monotonic=now), registry=registry)


class Worker:
    def __init__(self, engine: Engine):
        self.engine, self.messaging = engine, MemoryMessaging()
        self.busy = False
        self.probe = EngineProbe(
            host_of(self.messaging, loop_time),
            engine,
            busy=lambda: self.busy,
            step_timeout_s=120.0,
        )
        self.task = asyncio.create_task(self.probe.run())

    @property
    def ok(self) -> bool:
        return self.probe.verdict()[0]

    async def until(self, ok: bool, *, between: tuple[float, float]) -> None:
        """The verdict becomes `ok` within these seconds; it is asked once a second, as by
        heartbeats."""
        began = loop_time()
        while self.ok is not ok:
            assert loop_time() - began < 1000
            assert not self.task.done(), self.task
            await asyncio.sleep(0.1)
        assert between[0] <= loop_time() - began <= between[1]

    async def stays_ok(self, seconds: float) -> None:
        until = loop_time() + seconds
        while loop_time() < until:
            assert self.probe.verdict() == (True, "")
            await asyncio.sleep(1.0)

    async def close(self) -> None:
        async with asyncio.timeout(5):
            await end_tasks(self.task)


@virtual
async def test_a_stopped_engine_is_out_until_it_goes_on():
    worker = Worker(Engine())
    await worker.stays_ok(10)
    worker.engine.answers.clear()
    await worker.until(False, between=(2.0, 4.0))
    assert worker.probe.verdict()[1].startswith("the engine has not answered for 2.")
    await asyncio.sleep(20)
    assert not worker.ok
    worker.engine.answers.set()
    await worker.until(True, between=(0.0, 0.3))
    await worker.close()


@pytest.mark.parametrize("how", ["answers", "there"])
@virtual
async def test_an_engine_that_is_silent_for_good_is_given_up(how: str):
    worker = Worker(Engine())
    await worker.stays_ok(10)
    if how == "answers":
        worker.engine.answers.clear()
    else:
        worker.engine.there = False
    began = loop_time()
    with pytest.raises(EngineDied, match=r"has not answered for 3[0-4]\.\d s"):
        await worker.task
    assert 30 <= loop_time() - began <= 34


@virtual
async def test_no_answer_arrives_while_the_broker_is_away():
    worker = Worker(Engine())
    worker.engine.answers.clear()
    await asyncio.sleep(0.5)
    worker.messaging.set_connected(False)
    await worker.stays_ok(100)
    worker.messaging.set_connected(True)
    await worker.stays_ok(2)
    await worker.until(False, between=(0.0, 1.0))
    worker.engine.answers.set()
    await worker.until(True, between=(0.0, 0.3))
    await worker.close()


@pytest.mark.parametrize("described", [True, False])
@virtual
async def test_an_engine_with_work_but_without_steps_is_out_then_given_up(described: bool):
    worker = Worker(Engine(described=described))
    await worker.stays_ok(500)  # idle is not stuck
    worker.busy = True
    await worker.stays_ok(20)
    worker.engine.step()
    await worker.until(False, between=(30, 32))
    assert worker.probe.verdict()[1] == "the engine has work, but made no step for 30 s"
    worker.engine.step()
    await worker.until(True, between=(0.0, 1.1))
    await worker.until(False, between=(29, 32))
    worker.busy = False
    await worker.stays_ok(200)
    worker.busy = True
    began = loop_time()
    with pytest.raises(EngineDied, match=r"made no step for 12[0-4] s"):
        await worker.task
    assert 120 <= loop_time() - began <= 124


@virtual
async def test_an_engine_that_compiles_in_its_first_step_is_out_and_not_given_up():
    worker = Worker(Engine())
    worker.busy = True
    await worker.until(False, between=(30, 32))
    await asyncio.sleep(800)
    assert not worker.task.done()
    worker.engine.step()
    await worker.until(True, between=(0.0, 1.1))
    began = loop_time()
    with pytest.raises(EngineDied, match=r"made no step for 12[0-4] s"):
        await worker.task
    assert 118 <= loop_time() - began <= 124


@virtual
async def test_an_engine_that_never_gives_a_token_is_given_up_in_the_end():
    """Steps without a token show nothing: they may have computed nothing."""
    worker = Worker(Engine())
    worker.busy = True
    for _ in range(300):
        worker.engine.load, worker.engine.stepped_at = EngineLoad(), loop_time()
        await asyncio.sleep(1.0)
    began = loop_time()
    with pytest.raises(EngineDied, match=r"made no step for 90[0-4] s"):
        await worker.task
    assert 895 <= loop_time() - began <= 904


@virtual
async def test_steps_that_bring_no_output_are_steps():
    """A long prompt is computed chunk by chunk: only the engine's process knows."""
    worker = Worker(Engine())
    worker.busy = True
    for _ in range(300):
        worker.engine.stepped_at = loop_time()
        assert worker.ok
        await asyncio.sleep(1.0)
    await worker.close()


@pytest.mark.parametrize("asking", [True, False])
@virtual
async def test_a_worker_that_was_held_up_itself_gives_nothing_up(asking: bool):
    """Stopped for minutes, all of it; the engine answers right after."""
    engine = Engine()
    held_up_s = 0.0
    probe = EngineProbe(
        host_of(MemoryMessaging(), lambda: loop_time() + held_up_s),
        engine,
        busy=lambda: True,
        step_timeout_s=120.0,
    )
    task = asyncio.create_task(probe.run())
    if asking:
        engine.answers.clear()
    await asyncio.sleep(0.5)
    held_up_s = 300.0
    await asyncio.sleep(2.0)  # a question that ran out unanswered meanwhile
    engine.answers.set()
    engine.stepped_at += held_up_s
    await asyncio.sleep(5.0)
    assert probe.verdict() == (True, "")
    await end_tasks(task)
