"""A switch of roles step by step, with a store in memory that fails on demand."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as replace_record

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.errors import StoreUnavailable
from dynamo_lite.protocol.planner import SwitchRecord
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.clock import SYSTEM_CLOCK
from dynamo_lite.runtime.sealed_records import RecordSeals
from dynamo_lite.runtime.store import Lease
from dynamo_lite.services.planner.authentic import AuthenticRecords
from dynamo_lite.services.planner.connector import Order
from dynamo_lite.services.planner.switching import Switching
from dynamo_lite.services.planner.target import Target
from dynamo_lite.simulation.servers.memory_store import MemoryStore
from tests.builders import endpoint_record, graph_secret
from tests.contract.planning import D, P, SwitchingSupervisor
from tests.unit.planner_heir import Heir

LEASE = 7


class FailingStore(MemoryStore):
    #: Whether puts of a switch fail.
    away = False
    #: Whether a put that fails stores its value.
    stores = False

    async def put(self, key: str, value: bytes, *, lease: Lease | None = None) -> None:
        fails = self.away and key == names.planner_switch_key("n")
        if not fails or self.stores:
            await super().put(key, value, lease=lease)
        if fails:
            raise StoreUnavailable("etcd is away")


class Rig:
    """The switches of one planner: of two prefill workers one becomes a decode worker."""

    def __init__(self, store: FailingStore, records: AuthenticRecords | None = None):
        self.store, self.supervisor, self.now = store, SwitchingSupervisor(), 1000.0
        self.records = records
        self.supervisor.instant = False
        self.supervisor.ready[P] = 2
        self.clock = replace(SYSTEM_CLOCK, monotonic=lambda: self.now, wall=lambda: self.now)
        self.workers = [endpoint_record(lease, P) for lease in (LEASE, 8)]
        self.switching = self.planner()

    def planner(self) -> Switching:
        target = Target(self.store, "n", "test", self.clock, self.records)
        return Switching(
            self.store,
            "n",
            self.supervisor,
            target,
            lambda: 5.0,
            self.clock,
            self.members,
            records=self.records,
        )

    def members(self) -> list[EndpointRecord]:
        return self.workers

    async def begin(self) -> None:
        await self.switching.begin(D, self.workers[0], await self.supervisor.counts(), "a test")

    async def withdraw(self) -> None:
        (operation,) = self.switching.of(D)
        await self.switching.withdraw(operation.id)

    async def advance(self) -> None:
        self.now += 60.0
        await self.switching.advance(await self.supervisor.counts())

    async def phase(self) -> str:
        value = await self.store.get(names.planner_switch_key("n"))
        return decode_json(value, SwitchRecord).phase if value else ""


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with FailingStore() as store:
        yield Rig(store)


@pytest.mark.parametrize("stores", [False, True])
async def test_a_withdrawal_is_ordered_after_its_record_is_stored(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, stores: bool
):
    """A put that fails may have stored its value."""
    phases: list[str] = []
    cancel = rig.supervisor.cancel_switch

    async def noted(order: Order) -> None:
        phases.append(await rig.phase())
        await cancel(order)

    monkeypatch.setattr(rig.supervisor, "cancel_switch", noted)
    await rig.begin()
    rig.supervisor.finish_drain()
    rig.store.away, rig.store.stores = True, stores
    with pytest.raises(StoreUnavailable):
        await rig.withdraw()
    rig.store.away = False
    await rig.advance()
    assert phases == ["withdrawing"]
    assert await rig.phase() == "ended"
    assert rig.switching.ended == {(D, "switch", "withdrawn"): 1}


async def test_the_age_of_a_switch_does_not_depend_on_clocks(rig: Rig):
    """Its record is of another planner, whose clock is an hour ahead."""
    at = rig.now + 3600.0
    last = SwitchRecord(id=3, component=P, to=D, lease_id=LEASE, phase="ended", at=at)
    ages: list[float | None] = []
    for _ in range(2):
        seen = rig.switching.seen(last)
        assert seen is not None
        ages.append(seen.last_age_s)
        rig.now += 600.0
    newer = rig.switching.seen(replace_record(last, id=4))
    assert newer is not None
    assert [*ages, newer.last_age_s] == [0.0, 600.0, 0.0]


@pytest.mark.parametrize("stores", [False, True])
async def test_a_switch_whose_first_put_failed_is_no_replay_when_it_is_stored(
    tmp_path: Path, stores: bool
):
    """An operator has written a target meanwhile."""
    seals = RecordSeals(graph_secret(tmp_path / "secret"))
    async with FailingStore() as store:
        rig, heir = Rig(store, AuthenticRecords(seals)), Heir(store, seals)
        async with heir.watching():
            store.away, store.stores = True, stores
            await rig.begin()
            store.away = False
            await heir.set_by_operator(VllmWorker=1)
            await rig.advance()
            await heir.catch_up()
        assert heir.records.refused == {}
        rig.records = heir.records
        inherited = rig.planner()
        await inherited.load()
        assert inherited.victims([]) == {LEASE}
        assert len(rig.supervisor.orders) == 1


async def test_an_end_that_could_not_be_stored_is_told_and_learned_once(rig: Rig):
    rig.workers.append(endpoint_record(9, P))
    rig.supervisor.ready[P] = 3
    rig.supervisor.drain_s = 30.0
    await rig.begin()
    rig.supervisor.finish_drain()
    rig.supervisor.finish_start()
    rig.store.away = True
    for _ in range(2):
        await rig.advance()
    assert rig.switching.ended == {}
    rig.store.away = False
    await rig.advance()
    assert await rig.phase() == "ended"
    assert rig.switching.ended == {(D, "switch", "done"): 1}
    rig.workers.pop(0)
    rig.supervisor.drain_s = 10.0
    await rig.begin()
    rig.supervisor.finish_drain()
    rig.supervisor.finish_start()
    await rig.advance()
    history = rig.switching.seen(None)
    assert history is not None
    assert history.drain_s == 20.0, "the median of both"
