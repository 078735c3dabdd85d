"""Switches of roles by planners on real etcd and NATS: each is carried out once, to its end."""

from collections.abc import AsyncIterator
from typing import Any, Self

import pytest

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json, encode_json
from dynamo_lite.protocol.errors import UnknownWorker
from dynamo_lite.protocol.planner import SwitchRecord
from dynamo_lite.services.planner.connector import Order
from tests.builders import eventually
from tests.contract.planning import Bench, D, FakeSupervisor, P, Running, SwitchingSupervisor

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

DEVICES = 3
OPTIONS: dict[str, Any] = {"budget_devices": DEVICES}


class SwitchBench(Bench):
    """Two prefill workers and one decode worker, of three devices."""

    def __init__(self, nats_url: str, etcd_url: str, namespace: str):
        self.switching = SwitchingSupervisor()
        self.prefill: list[int] = []
        super().__init__(nats_url, etcd_url, namespace, self.switching)

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.supervisor.ready[P] = 2
        self.prefill = [await self.worker(P), await self.worker(P)]
        await self.worker(D)
        return self

    async def record(self) -> SwitchRecord | None:
        value = await self.store.get(names.planner_switch_key(self.namespace))
        return decode_json(value, SwitchRecord) if value else None

    async def in_phase(self, phase: str) -> None:
        async def reached() -> bool:
            record = await self.record()
            return record is not None and record.phase == phase

        await eventually(reached, 20)

    async def reverse(self) -> None:
        """What only a switch reaches at once: the budget is full."""
        await self.want(PrefillWorker=1, VllmWorker=2)

    async def until_reversed(self) -> None:
        await self.until_settled(PrefillWorker=1, VllmWorker=2)
        await self.in_phase("ended")


@pytest.fixture
async def bench(nats_url: str, etcd_url: str, namespace: str) -> AsyncIterator[SwitchBench]:
    async with SwitchBench(nats_url, etcd_url, namespace) as bench:
        yield bench
    assert bench.switching.most <= DEVICES
    assert {order.lease_id for order in bench.switching.taken("switch")} <= {*bench.prefill}


async def test_with_a_full_budget_a_worker_is_switched(bench: SwitchBench):
    async with bench.planner(**OPTIONS) as running:
        await bench.reverse()
        await bench.until_reversed()
        await _ended(running, "done")
    ((what, order),) = bench.switching.orders
    assert (what, order.component, order.to, order.count) == ("switch", P, D, 1)
    record = await bench.record()
    assert record is not None and record.reason.startswith("becomes a decode worker")


async def test_a_worker_that_has_left_its_role_counts_no_more_while_it_is_registered(
    bench: SwitchBench,
):
    def counts(running: Running) -> dict[str, int]:
        return {role["component"]: role["count"] for role in running.facts["roles"]}

    async with bench.planner(**OPTIONS) as running:
        await bench.reverse()
        await bench.until_reversed()
        await eventually(lambda: counts(running) == {P: 1, D: 2}, 20)
    async with bench.planner(1, **OPTIONS) as running:
        await eventually(lambda: running.facts["leads"] and not running.facts["hold"], 20)
        await eventually(lambda: counts(running) == {P: 1, D: 2}, 20)
    assert len(bench.switching.orders) == 1


@pytest.mark.parametrize(
    ("moment", "instant"),
    [("switch before", True), ("switch after", True), ("switch after", False)],
)
async def test_an_order_is_carried_out_once_after_its_planner_s_end(
    bench: SwitchBench, moment: str, instant: bool
):
    bench.switching.stop_at, bench.switching.instant = moment, instant
    async with bench.planner(**OPTIONS):
        await bench.reverse()
        await bench.switching.stopped.wait()
        await bench.in_phase("ordered")
    async with bench.planner(1, **OPTIONS):
        if not instant:
            await bench.in_phase("asked")
            bench.switching.finish_drain()
            bench.switching.finish_start()
        await bench.until_reversed()
    assert len(bench.switching.states) == 1
    assert len(bench.switching.orders) == 1


@pytest.mark.parametrize("phase", ["draining", "starting"])
async def test_what_is_under_way_is_awaited_by_the_next_planner(bench: SwitchBench, phase: str):
    bench.switching.instant = False
    async with bench.planner(**OPTIONS):
        await bench.reverse()
        await bench.in_phase("asked")
        if phase == "starting":
            bench.switching.finish_drain()
    async with bench.planner(1, **OPTIONS) as running:
        await eventually(lambda: running.facts["operations"] == 1, 20)
        assert "under way" in _reason(running, P) or running.facts["hold"]
        if phase == "draining":
            bench.switching.finish_drain()
        bench.switching.finish_start()
        await bench.until_reversed()
    assert [what for what, _ in bench.switching.orders] == ["switch"]


@pytest.mark.parametrize("moment", ["cancel before", "cancel after", ""])
async def test_a_start_that_takes_too_long_is_withdrawn_also_after_a_planner_s_end(
    bench: SwitchBench, moment: str
):
    bench.switching.instant = False
    bench.switching.stop_at = moment
    async with bench.planner(start_timeout_s=30.0, **OPTIONS) as running:
        await bench.reverse()
        await bench.in_phase("asked")
        bench.switching.finish_drain()
        if moment:
            await bench.switching.stopped.wait()
            await bench.in_phase("withdrawing")
        else:
            await eventually(lambda: "1 starts have failed" in _reason(running, D), 20)
    async with bench.planner(1, start_timeout_s=30.0, **OPTIONS):
        await bench.in_phase("ended")
    assert bench.switching.ready == {P: 1, D: 1}
    assert not bench.switching.unfinished("starting")
    assert len(bench.switching.taken("cancel")) == 1
    assert len(bench.switching.taken("switch")) == 1


async def test_one_that_becomes_ready_while_it_is_withdrawn_stays(bench: SwitchBench):
    bench.switching.instant = False
    bench.switching.stop_at = "cancel before"
    async with bench.planner(start_timeout_s=30.0, **OPTIONS):
        await bench.reverse()
        await bench.in_phase("asked")
        bench.switching.finish_drain()
        await bench.switching.stopped.wait()
    bench.switching.finish_start()
    async with bench.planner(1, **OPTIONS):
        await bench.until_reversed()
    assert bench.switching.taken("cancel") == []


async def test_a_withdrawal_that_comes_too_late_changes_nothing(
    bench: SwitchBench, monkeypatch: pytest.MonkeyPatch
):
    async def too_late(order: Order) -> None:
        bench.switching.finish_start()
        raise UnknownWorker("no process has the lease")

    bench.switching.instant = False
    monkeypatch.setattr(bench.switching, "cancel_switch", too_late)
    async with bench.planner(start_timeout_s=30.0, **OPTIONS) as running:
        await bench.reverse()
        await bench.in_phase("asked")
        bench.switching.finish_drain()
        await bench.until_reversed()
        await _ended(running, "done")


async def test_a_switch_that_is_resumed_spares_the_last_worker(bench: SwitchBench):
    bench.switching.stop_at = "switch before"
    async with bench.planner(**OPTIONS):
        await bench.reverse()
        await bench.switching.stopped.wait()
        record = await bench.record()
    assert record is not None
    (other,) = set(bench.prefill) - {record.lease_id}
    await bench.store.revoke(other)
    bench.switching.ready[P] = 1
    await bench.target.set_manual({P: 1, D: 1}, "a test")
    async with bench.planner(1, **OPTIONS) as running:
        await _ended(running, "refused")
    assert bench.switching.taken("switch") == []
    assert await bench.record() is None


async def test_an_order_that_is_refused_changes_nothing_and_spares_unknown_workers(
    bench: SwitchBench, monkeypatch: pytest.MonkeyPatch
):
    asked: list[int] = []

    async def unknown(order: Order) -> None:
        asked.append(order.lease_id)
        raise UnknownWorker("no process has the lease")

    monkeypatch.setattr(bench.switching, "switch", unknown)
    async with bench.planner(**OPTIONS) as running:
        await bench.reverse()
        await _ended(running, "refused")
        # It counts as a failed start.
        await eventually(lambda: "1 starts have failed" in _reason(running, D), 20)
        assert running.planner._switching.foreign == {*asked}
    # The surplus prefill worker may have been removed meanwhile.
    assert bench.switching.ready == {P: 2 - len(bench.switching.taken("remove")), D: 1}


async def test_a_switch_that_nobody_knows_any_more_has_failed(bench: SwitchBench):
    bench.switching.instant = False
    async with bench.planner(**OPTIONS) as running:
        await bench.reverse()
        await bench.in_phase("asked")
        bench.switching.states.clear()  # the supervisor was started again
        bench.switching.draining[P].clear()
        await _ended(running, "failed")


async def test_an_old_switch_without_an_order_is_dropped_and_an_unreadable_one_ignored(
    bench: SwitchBench,
):
    key = names.planner_switch_key(bench.namespace)
    old = SwitchRecord(id=1, component=P, to=D, lease_id=bench.prefill[0], phase="ordered")
    for value in (encode_json(old), b"[]"):
        await bench.store.put(key, value)
        async with bench.planner(**OPTIONS) as running:
            await eventually(lambda: running.facts["leads"], 20)
            await eventually(lambda: not running.facts["hold"], 20)
            assert running.facts["operations"] == 0
    assert bench.switching.orders == []


async def test_where_no_role_can_be_switched_one_leaves_and_one_comes(
    nats_url: str, etcd_url: str, namespace: str
):
    async with Bench(nats_url, etcd_url, namespace, FakeSupervisor()) as bench:
        bench.supervisor.ready[P] = 2
        for component in (P, P, D):
            await bench.worker(component)
        async with bench.planner(**OPTIONS):
            await bench.want(PrefillWorker=1, VllmWorker=2)
            await bench.until_settled(PrefillWorker=1, VllmWorker=2)
        assert [what for what, _ in bench.supervisor.orders] == ["remove", "add"]


async def _ended(running: Running, outcome: str) -> None:
    ended = running.planner._switching.ended
    await eventually(lambda: ended == {(D, "switch", outcome): 1}, 20)


def _reason(running: Running, component: str) -> str:
    roles = {role["component"]: role["reason"] for role in running.facts["roles"]}
    return roles.get(component, "")
