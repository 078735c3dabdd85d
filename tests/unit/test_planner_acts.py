"""What the planner writes and orders when an order fails, changes nothing, or comes too late."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_lite.planner import drains
from dynamo_lite.planner.acts import Acts
from dynamo_lite.planner.drains import GraphSeen
from dynamo_lite.planner.policy.inputs import Role
from dynamo_lite.planner.policy.memory import Change
from dynamo_lite.planner.record import WantedEdit
from dynamo_lite.protocol.errors import DynamoLiteError, Refused, Unavailable
from dynamo_lite.protocol.planner import WantedRecord
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.clock import Clock
from tests.builders import endpoint_record
from tests.contract.planning import D, FakeSupervisor

ADD = Change(role=Role.DECODE, by=1, reason="")
REMOVE = Change(role=Role.DECODE, by=-1, reason="")
WITHDRAW = Change(role=Role.DECODE, by=-1, reason="", withdraws=True)


class Graph:
    """Two decode workers that serve, a supervisor, and the planner's record."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, chooses_victim: bool = True):
        self.supervisor = FakeSupervisor(chooses_victim=chooses_victim)
        self.supervisor.ready[D], self.supervisor.instant = 2, False
        self.members = {i: endpoint_record(i, D, host=f"host-{i}") for i in (1, 2)}
        self.record = WantedRecord()
        #: Raised by the next edit, revocation or change.
        self.edit_fails: list[DynamoLiteError | None] = []
        self.revoke_fails: list[DynamoLiteError] = []
        self.change_fails: list[DynamoLiteError] = []
        host: Any = SimpleNamespace(
            lease=SimpleNamespace(id=9), certificates=None, clock=Clock(), store=self
        )
        records: Any = self
        self.acts = Acts(host, self.supervisor, records, lambda: self.members)
        change = self.supervisor.change

        async def change_or_fail(component: str, count: int, lease_id: int = 0) -> None:
            if self.change_fails:
                raise self.change_fails.pop(0)
            await change(component, count, lease_id)

        async def look(records: Iterable[EndpointRecord], _certificates: Any) -> GraphSeen:
            found = {one.lease_id: one for one in records}
            facts = {"ok": True, "state": "ready", "in_flight": 0}
            return GraphSeen(records=found, facts=dict.fromkeys(found, facts))

        monkeypatch.setattr(self.supervisor, "change", change_or_fail)
        monkeypatch.setattr(drains, "look", look)

    def may_act(self) -> float:
        return 5.0

    async def edit(self, change: WantedEdit) -> WantedRecord:
        if self.edit_fails and (error := self.edit_fails.pop(0)):
            raise error
        self.record = change(self.record)
        return self.record

    async def revoke(self, lease_id: int) -> None:
        if self.revoke_fails:
            raise self.revoke_fails.pop()
        del self.members[lease_id]

    async def begin(self, change: Change) -> bool:
        return await self.acts.begin(change, (await self.supervisor.counts())[D])

    async def end_leaving(self) -> None:
        await self.acts.end_leaving(self.record, await self.supervisor.counts(), 600.0)


async def test_a_withdrawal_that_is_not_carried_out_is_no_failed_start(
    monkeypatch: pytest.MonkeyPatch,
):
    graph = Graph(monkeypatch)
    graph.supervisor.starting[D] = 1
    graph.change_fails = [Refused("the graph is starting", elsewhere=False), Unavailable("409")]
    for _ in range(2):
        with pytest.raises((Refused, Unavailable)):
            await graph.begin(WITHDRAW)
        assert graph.record.roles[D].failures == 0
    await graph.begin(WITHDRAW)
    assert graph.record.roles[D].failures == 1


async def test_no_order_follows_a_pause(monkeypatch: pytest.MonkeyPatch):
    graph = Graph(monkeypatch)
    graph.record = paused = WantedRecord(paused="")
    with pytest.raises(Unavailable, match="paused"):
        await graph.begin(ADD)
    assert graph.supervisor.orders == [] and graph.record == paused
    graph.record = WantedRecord(paused="", manual={D: 3})
    assert await graph.begin(ADD)


@pytest.mark.parametrize("edit_fails", [False, True])
async def test_after_a_failed_order_the_record_is_settled_before_it_counts(
    monkeypatch: pytest.MonkeyPatch, edit_fails: bool
):
    graph = Graph(monkeypatch)
    graph.change_fails = [Unavailable("away")]
    graph.edit_fails = [None, Unavailable("etcd")] if edit_fails else []
    with pytest.raises(Unavailable):
        await graph.begin(ADD)
    assert graph.acts.unsure is graph.record.roles[D].starting is edit_fails


async def test_a_worker_whose_lease_was_not_revoked_is_not_preferred(
    monkeypatch: pytest.MonkeyPatch,
):
    graph = Graph(monkeypatch, chooses_victim=False)
    graph.revoke_fails = [Unavailable("etcd")]
    with pytest.raises(Unavailable):
        await graph.begin(REMOVE)
    assert len(graph.supervisor.preferred) == 1
    await graph.end_leaving()
    assert graph.supervisor.preferred == graph.supervisor.orders == []
    assert (graph.record.roles[D].count, graph.record.roles[D].leaving) == (2, ())


async def test_a_worker_that_stays_does_not_wait_for_one_that_drains(
    monkeypatch: pytest.MonkeyPatch,
):
    graph = Graph(monkeypatch, chooses_victim=False)
    graph.members[3], graph.supervisor.ready[D] = endpoint_record(3, D, host="host-3"), 3
    await graph.begin(REMOVE)
    graph.revoke_fails = [Unavailable("etcd")]
    with pytest.raises(Unavailable):
        await graph.begin(REMOVE)
    drains_first, _ = graph.supervisor.preferred
    await graph.end_leaving()
    assert graph.supervisor.preferred == [drains_first]
    assert [one.host for one in graph.record.roles[D].leaving] == [drains_first]


async def test_a_worker_that_an_order_did_not_remove_can_be_removed_later(
    monkeypatch: pytest.MonkeyPatch,
):
    """Another one has left by itself since the numbers were asked for."""
    graph = Graph(monkeypatch)
    change = graph.supervisor.change

    async def changes_nothing(component: str, count: int, lease_id: int = 0) -> None:
        """The number is that already."""

    monkeypatch.setattr(graph.supervisor, "change", changes_nothing)
    assert await graph.begin(REMOVE)
    monkeypatch.setattr(graph.supervisor, "change", change)
    assert await graph.begin(REMOVE)
    assert [order.lease_id for order in graph.supervisor.taken("remove")] == [1]
