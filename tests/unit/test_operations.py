"""Changes of the numbers of workers step by step, with a store in memory and time on demand."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from dynamo_lite.planner.connector import LocalConnector, Order
from dynamo_lite.planner.departure import Departure
from dynamo_lite.planner.operations import Operations
from dynamo_lite.planner.policy.drain import Safe, Unsafe
from dynamo_lite.planner.target import Target
from dynamo_lite.planner.under_way import UnderWay
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.errors import Refused, StoreUnavailable, Unavailable, UnknownWorker
from dynamo_lite.protocol.planner import OperationRecord, RoleCounts
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.clock import SYSTEM_CLOCK
from dynamo_lite.runtime.store import Lease
from dynamo_lite.serve.supervisor_socket import SupervisorSocket
from tests.builders import endpoint_record
from tests.contract.planning import D, FakeSupervisor, P
from tests.twins.servers import MemoryStore


class Rig:
    """One planner's operations. `supervisor.instant` is off: starts and drains end on demand."""

    def __init__(self, store: MemoryStore, supervisor: FakeSupervisor):
        self.store, self.supervisor = store, supervisor
        supervisor.instant = False
        self.now = 1000.0
        self.members: list[EndpointRecord] = []
        self.leads, self.least = True, 1
        clock = replace(SYSTEM_CLOCK, monotonic=lambda: self.now, wall=lambda: self.now)
        target = Target(store, "n", "test", clock)
        self.under_way = UnderWay(store, "n", clock)
        self.operations = Operations(
            self.under_way,
            store,
            "n",
            supervisor,
            target,
            self.may_act,
            clock,
            lambda: self.members,
            least=lambda component: self.least,
        )

    def may_act(self) -> float:
        if not self.leads:
            raise Unavailable("another planner leads")
        return 5.0

    async def add(self, component: str, size: int = 1) -> int:
        """Returns the operation's id."""
        await self.operations.add(component, size, await self.supervisor.counts(), "test")
        return self.under_way.of(component)[-1].id

    async def advance(self, seconds: float = 0.0) -> None:
        self.now += seconds
        await self.operations.advance(await self.supervisor.counts())


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with MemoryStore() as store:
        yield Rig(store, FakeSupervisor())


async def test_a_withdrawal_is_ordered_after_its_record_is_stored(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    async def away(*args: object) -> None:
        raise StoreUnavailable("etcd is away")

    phases: list[str] = []
    take = rig.supervisor.remove

    async def noted(order: Order) -> None:
        (value,) = (await rig.store.get_prefix(names.planner_operations_prefix("n"))).values()
        phases.append(decode_json(value, OperationRecord).phase)
        await take(order)

    monkeypatch.setattr(rig.supervisor, "remove", noted)
    operation = await rig.add(P)
    with monkeypatch.context() as patched, pytest.raises(StoreUnavailable):
        patched.setattr(rig.store, "put", away)
        await rig.operations.withdraw(operation)
    await rig.advance()
    assert phases == ["withdrawing"]
    assert rig.under_way.starts(P) == (0, 1)


async def remove(rig: Rig, lease_id: int) -> None:
    victim = endpoint_record(lease_id)
    await rig.operations.remove(D, victim, await rig.supervisor.counts(), "test", 60.0)


@pytest.mark.parametrize(
    ("error", "foreign"),
    [
        (UnknownWorker("no process has the lease"), {7}),
        (Refused("the graph is draining", elsewhere=False), set()),
        (Unavailable("somebody else was faster"), set()),
    ],
)
async def test_only_an_unknown_worker_is_spared_for_ever(
    rig: Rig, error: Exception, foreign: set[int]
):
    async def fails(order: Order) -> None:
        raise error

    rig.supervisor.ready[D] = 2
    rig.supervisor.remove = fails
    await remove(rig, 7)
    assert rig.under_way.foreign == foreign


class Refusing:
    """Implements `Scaled`."""

    def counts(self) -> dict[str, RoleCounts]:
        return {}

    def add(self, component: str) -> str:
        return f"{component}-1"

    def retire(self, component: str, lease_id: int) -> str:
        raise UnknownWorker("no such lease") if lease_id else Refused("none", elsewhere=False)


async def test_an_order_with_the_version_of_another_one_may_be_repeated(tmp_path: Path):
    connector = LocalConnector(tmp_path)
    async with SupervisorSocket(tmp_path, Refusing()):
        await connector.add(Order(component=P, version=5, count=2))
        for version in (4, 5):
            with pytest.raises(Unavailable, match="is old"):
                await connector.remove(Order(component=D, version=version, count=1, lease_id=7))
        with pytest.raises(UnknownWorker, match="no such lease"):
            await connector.remove(Order(component=D, version=6, count=1, lease_id=7))
        with pytest.raises(Refused, match="none") as refused:
            await connector.remove(Order(component=D, version=7, count=1))
        assert not isinstance(refused.value, UnknownWorker)


async def test_a_withdrawal_leaves_the_workers_of_before(rig: Rig):
    rig.supervisor.chooses_victim = False
    rig.supervisor.ready[D] = 3
    operation = await rig.add(D)
    # One that served is not ready for a while.
    rig.supervisor.ready[D], rig.supervisor.starting[D] = 2, 2
    await rig.operations.withdraw(operation)
    await rig.advance()
    assert [order.count for order in rig.supervisor.taken("remove")] == [3]
    assert not rig.under_way.of(D)


@pytest.fixture
def drained(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Leases of workers that are safe to end."""
    leases: set[int] = set()

    async def look(departure: Departure, _members: object) -> Safe | Unsafe:
        safe = departure._worker.lease_id in leases
        return Safe(reason="test") if safe else Unsafe(reason="test")

    monkeypatch.setattr(Departure, "look", look)
    return leases


async def test_two_workers_that_leave_are_ended_one_after_the_other(rig: Rig, drained: set[int]):
    """The second one has drained first; the order for both would end the first one, too."""
    rig.supervisor.chooses_victim = False
    rig.supervisor.ready[D] = 40
    await remove(rig, 7)
    await remove(rig, 8)
    drained.add(8)
    await rig.advance()
    assert rig.supervisor.taken("remove") == []
    drained.add(7)
    await rig.advance()
    await rig.advance()
    await rig.advance()
    assert [order.count for order in rig.supervisor.taken("remove")] == [39, 38]
    assert not rig.under_way.of(D)


async def test_workers_that_came_while_one_drained_stay(rig: Rig, drained: set[int]):
    """An operator scales up meanwhile. Each of the two removals ends its own worker only."""
    rig.supervisor.chooses_victim = False
    rig.supervisor.ready[D] = 4
    await remove(rig, 7)
    await remove(rig, 8)
    rig.supervisor.ready[D] = 10
    await rig.advance(5.0)
    assert rig.supervisor.taken("remove") == []
    drained.update({7, 8})
    for _ in range(3):
        await rig.advance(5.0)
    assert [order.count for order in rig.supervisor.taken("remove")] == [9, 8]
    assert rig.supervisor.ready[D] == 8
    assert not rig.under_way.of(D)


async def test_a_start_that_ends_without_a_worker_has_failed(rig: Rig):
    await rig.add(P)
    rig.supervisor.starting[P] = 0
    await rig.advance()
    assert rig.under_way.starts(P) == (0, 1)


async def test_a_start_counts_once_however_often_its_record_cannot_be_deleted(rig: Rig):
    delete, refusals = rig.store.delete, 3

    async def away(key: str) -> bool:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise StoreUnavailable("etcd is away")
        return await delete(key)

    rig.store.delete = away
    await rig.add(P)
    rig.supervisor.finish_starts()
    for _ in range(4):
        await rig.advance(60.0)
    assert rig.under_way.starts(P) == (1, 0)


async def test_an_operation_whose_record_may_be_stored_goes_on(rig: Rig):
    put = rig.store.put

    async def stored_and_lost(key: str, value: bytes, *, lease: Lease | None = None) -> None:
        await put(key, value, lease=lease)
        if key.startswith(names.planner_operations_prefix("n")):
            rig.store.put = put
            raise StoreUnavailable("no answer")

    rig.store.put = stored_and_lost
    await rig.add(P)
    assert rig.supervisor.orders == []
    await rig.advance(2.0)
    rig.supervisor.finish_starts()
    await rig.advance()
    assert rig.supervisor.ready[P] == 2
    assert await rig.store.get_prefix(names.planner_operations_prefix("n")) == {}


@pytest.mark.parametrize(("age_s", "resumed"), [(10.0, 1), (400.0, 0)])
async def test_an_old_operation_without_an_order_is_dropped(rig: Rig, age_s: float, resumed: int):
    rig.supervisor.stop_at = "add before"
    begun = asyncio.create_task(rig.add(P))
    await rig.supervisor.stopped.wait()
    begun.cancel()
    await asyncio.wait([begun])
    rig.now += age_s
    await rig.under_way.load()
    assert len(rig.under_way) == resumed
    left = await rig.store.get_prefix(names.planner_operations_prefix("n"))
    assert len(left) == resumed


@pytest.mark.parametrize(
    ("registered", "ready", "least", "ended"),
    [(2, 2, 1, "done"), (1, 1, 1, "refused"), (1, 2, 1, "refused"), (2, 2, 2, "refused")],
)
async def test_a_removal_that_is_resumed_spares_the_last_worker(
    rig: Rig, registered: int, ready: int, least: int, ended: str
):
    rig.members = [endpoint_record(lease_id, component=D) for lease_id in (7, 8, 9)]
    rig.supervisor.ready[D] = 3
    rig.supervisor.stop_at = "remove before"
    begun = asyncio.create_task(remove(rig, 7))
    await rig.supervisor.stopped.wait()
    begun.cancel()
    await asyncio.wait([begun])
    await rig.under_way.load()
    rig.members, rig.supervisor.ready[D] = rig.members[:registered], ready
    rig.least = least
    await rig.advance()
    rig.supervisor.finish_drains()
    await rig.advance()
    assert rig.under_way.ended == {(D, "remove", ended): 1}


async def test_who_does_not_lead_withdraws_nothing(rig: Rig):
    operation = await rig.add(P)
    rig.leads = False
    with pytest.raises(Unavailable, match="another planner leads"):
        await rig.operations.withdraw(operation)
    assert not rig.under_way.of(P)[0].withdrawing
