"""How the planner's process interprets its observations: loads, changes, workers that leave."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dynamo_lite.overview.model import Latency, LiveProcess, Overview
from dynamo_lite.overview.observer import Observer
from dynamo_lite.policy.scaling.drain import Safe, Unsafe
from dynamo_lite.protocol import names
from dynamo_lite.protocol.backlog import Backlog
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.planner import Change, OperationRecord, TargetRecord
from dynamo_lite.runtime.clock import SYSTEM_CLOCK
from dynamo_lite.services.planner import departure
from dynamo_lite.services.planner.departure import Departure, worker_of
from dynamo_lite.services.planner.observation import Observation
from dynamo_lite.services.planner.roles import LastChanges
from tests.builders import eventually
from tests.contract.planning import D, P
from tests.simulation.servers.memory import MemoryMessaging, MemoryStore

SEEN = Overview(at=0.0, namespace="n", rate_s=1.0, latency_s=1.0, itl=Latency())


def worker(waiting: int) -> LiveProcess:
    return LiveProcess(
        component=D,
        instance=0,
        lease="1",
        state="ready",
        running=2,
        waiting=waiting,
        kv_usage=0.5,
        kv_tokens=1000,
    )


@pytest.fixture
def host() -> Any:
    return SimpleNamespace(
        store=MemoryStore(),
        messaging=MemoryMessaging(),
        spec=SimpleNamespace(namespace="n"),
        drops=lambda what: None,
        clock=SYSTEM_CLOCK,
    )


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[LiveProcess]:
    """The workers that an observation finds."""
    workers: list[LiveProcess] = []

    async def look(_: Observer) -> Overview:
        return msgspec.structs.replace(SEEN, workers=tuple(workers))

    monkeypatch.setattr(Observer, "look", look)
    return workers


async def test_without_nats_it_is_not_known_what_waiting_prompts_need(
    host: Any, seen: list[LiveProcess]
):
    async with Observation(host) as observation:
        report = Backlog(engine_id="e", number=1, claimed_jobs=2, claimed_tokens=400)
        await host.messaging.publish(names.backlog_subject("n"), encode(report))
        seen[:] = [worker(3)]

        async def heard() -> bool:
            parked = (await observation.look()).decode.kv_parked
            return parked is not None and parked > 0

        await eventually(heard)
        known = (await observation.look()).decode
        host.messaging.set_connected(False)
        unknown = (await observation.look()).decode
        seen[:] = [worker(0)]
        nothing_waits = (await observation.look()).decode
    assert known.kv_waiting == pytest.approx(0.25)
    assert known.kv_parked == pytest.approx(0.4)
    assert unknown.kv_waiting is None
    assert unknown.kv_parked is None
    # What the workers say at /health does not need NATS.
    assert unknown.waiting == 3
    assert nothing_waits.kv_waiting == 0


async def test_engines_without_remote_prefills_never_tell_of_a_backlog(
    host: Any, seen: list[LiveProcess]
):
    seen[:] = [worker(2)]
    async with Observation(host) as observation:
        load = (await observation.look()).decode
    assert load.kv_waiting == pytest.approx(0.5)


def test_the_age_of_a_change_does_not_depend_on_the_clock_of_who_made_it():
    now = 100.0
    changes = LastChanges(lambda: now)
    assert changes.of(P) is None
    ahead = TargetRecord(
        counts={}, version=1, by="", reason="", changes={P: Change(up=True, at=9e9)}
    )
    changes.note(ahead)
    now = 130.0
    changes.note(ahead)
    last = changes.of(P)
    assert last is not None and (last.up, last.age_s) == (True, 30.0)
    changes.note(
        TargetRecord(counts={}, version=2, by="", reason="", changes={P: Change(up=False, at=1.0)})
    )
    last = changes.of(P)
    assert last is not None and (last.up, last.age_s) == (False, 0.0)


async def test_a_leaving_worker_that_gets_work_again_is_idle_only_after_that(
    monkeypatch: pytest.MonkeyPatch,
):
    now = 10.0
    facts: dict[str, Any] = {"in_flight": 0}
    asked_age_s = 0.0

    def writers(asked_at: float) -> Any:
        return {7: (frozenset(), asked_at - asked_age_s)}

    async def look(_members: Any) -> Any:
        return SimpleNamespace(facts={7: facts}, writers=writers)

    async def listens(_worker: Any) -> bool:
        return True

    monkeypatch.setattr(departure, "look", look)
    monkeypatch.setattr(departure, "listens", listens)
    operation = OperationRecord(
        id=1, kind="remove", component=D, phase="leaving", count=1, lease_id=7
    )
    leaving = Departure(worker_of(operation, "n"), lambda: now)
    assert isinstance(await leaving.look([]), Safe)
    facts["in_flight"], now = 1, 20.0
    assert isinstance(await leaving.look([]), Unsafe)
    # Its ledger was asked before it became idle again: that says nothing.
    facts["in_flight"], now, asked_age_s = 0, 30.0, 5.0
    assert isinstance(await leaving.look([]), Unsafe)
    now, asked_age_s = 40.0, 5.0
    assert isinstance(await leaving.look([]), Safe)
