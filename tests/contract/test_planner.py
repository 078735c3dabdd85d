"""Planners on real etcd and NATS: one acts, and what one has begun the next one ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from dynamo_lite.cli import live_options, planner
from dynamo_lite.cli.listing import Place
from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import (
    ConfigError,
    DeadlineExceeded,
    Refused,
    StartupError,
    Unavailable,
)
from tests.builders import eventually
from tests.contract.planning import TICK_S, Bench, D, FakeSupervisor, P
from tests.servers import PrivateServer

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


@pytest.fixture
async def bench(nats_url: str, etcd_url: str, namespace: str) -> AsyncIterator[Bench]:
    async with Bench(nats_url, etcd_url, namespace, FakeSupervisor()) as bench:
        yield bench


async def test_what_an_operator_sets_is_reached_and_then_forgotten(bench: Bench):
    async with bench.planner():
        await bench.want(PrefillWorker=3, VllmWorker=2)
        await bench.until_settled(PrefillWorker=3, VllmWorker=2)

        async def forgotten() -> bool:
            return not (await bench.wanted()).manual

        await eventually(forgotten)
        for _ in range(3):
            await bench.worker(P)
        await bench.want(PrefillWorker=2)
        await bench.until_settled(PrefillWorker=2, VllmWorker=2)
    added = {(order.component, order.count) for order in bench.supervisor.taken("add")}
    assert added == {(P, 3), (D, 2)}


async def test_two_planners_one_acts_and_the_other_takes_over(bench: Bench):
    async with bench.planner(1) as second:
        async with bench.planner(0) as first:
            assert await bench.leader() == second.lease_id
            await eventually(lambda: "leads" in first.facts["hold"])
            await bench.want(PrefillWorker=2)
            await bench.until_settled(PrefillWorker=2)
            assert len(bench.supervisor.taken("add")) == 1
            lease_id = second.lease_id
            await bench.store.revoke(lease_id)

            async def taken_over() -> bool:
                return await bench.leader() == first.lease_id

            await eventually(taken_over, 20)
            await bench.want(PrefillWorker=3)
            await bench.until_settled(PrefillWorker=3)
    assert [order.count for order in bench.supervisor.taken("add")] == [2, 3]


async def test_a_start_is_awaited_by_the_next_planner(bench: Bench):
    bench.supervisor.instant = False
    async with bench.planner():
        await bench.want(PrefillWorker=2)
        await eventually(lambda: bench.supervisor.starting[P] == 1, 20)
    async with bench.planner(1) as running:
        await eventually(lambda: "a start is under way" in _reason(running, P), 20)
        bench.supervisor.finish_starts()
        await bench.until_settled(PrefillWorker=2)
    assert len(bench.supervisor.orders) == 1


@pytest.mark.parametrize("moment", ["", "remove before", "remove after", "add before", "add after"])
async def test_with_a_full_budget_one_leaves_and_then_one_comes(bench: Bench, moment: str):
    """Also when the planner ends in between."""
    supervisor = bench.supervisor
    supervisor.ready[P], supervisor.instant, supervisor.stop_at = 2, False, moment
    leases = [await bench.worker(component) for component in (P, P, D)]
    async with AsyncExitStack() as first, AsyncExitStack() as second:

        async def replaced() -> None:
            await supervisor.stopped.wait()
            await first.aclose()
            await second.enter_async_context(bench.planner(1, budget_devices=3))

        await first.enter_async_context(bench.planner(budget_devices=3))
        await bench.want(PrefillWorker=1, VllmWorker=2)
        if moment.startswith("remove"):
            await replaced()
        await eventually(lambda: supervisor.draining[P], 20)
        (victim,) = supervisor.draining[P]
        assert victim in leases[:2] and supervisor.taken("add") == []
        supervisor.finish_drains()
        await bench.store.revoke(victim)
        if moment.startswith("add"):
            await replaced()
        await eventually(lambda: supervisor.starting[D] == 1, 20)
        supervisor.finish_starts()
        await bench.until_settled(PrefillWorker=1, VllmWorker=2)
    assert {order.lease_id for order in supervisor.taken("remove")} == {victim}
    assert len(supervisor.taken("add")) == 1


async def test_an_order_that_fails_is_no_failed_start(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    change, errors = bench.supervisor.change, [Unavailable("away"), DeadlineExceeded("it", 1.0)]

    async def fails(component: str, count: int, victim: Any = None) -> None:
        if errors:
            raise errors.pop()
        await change(component, count, victim)

    monkeypatch.setattr(bench.supervisor, "change", fails)
    async with bench.planner() as running:
        await bench.want(PrefillWorker=2)
        await bench.until_settled(PrefillWorker=2)
        assert running.failures("order") == 2 and running.failures("store") == 0


async def test_a_start_that_is_refused_or_ends_without_a_worker_has_failed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    async def refuses(component: str, count: int, victim: Any = None) -> None:
        if component == P:
            raise Refused("no device is free", elsewhere=False)
        bench.supervisor.starting[D] = 1

    monkeypatch.setattr(bench.supervisor, "change", refuses)
    async with bench.planner() as running:
        await bench.want(PrefillWorker=2, VllmWorker=2)
        await eventually(lambda: bench.supervisor.starting[D], 20)
        await eventually(lambda: "1 starts have failed" in _reason(running, P), 20)
        await eventually(lambda: "a start is under way" in _reason(running, D), 20)
        bench.supervisor.starting[D] = 0
        await eventually(lambda: "1 starts have failed" in _reason(running, D), 20)


async def test_while_paused_only_an_operator_s_number_counts(bench: Bench):
    await bench.edit(paused="an upgrade")
    async with bench.planner() as running:
        await eventually(lambda: running.facts["hold"] == "paused: an upgrade")
        await bench.want(PrefillWorker=2)
        await bench.until_settled(PrefillWorker=2)
        await eventually(lambda: running.facts["hold"] == "paused: an upgrade")
        key = names.planner_wanted_key(bench.namespace)
        await bench.store.put(key, b"[]")
        await eventually(lambda: "cannot be read" in running.facts["hold"])
        await bench.store.delete(key)
        await eventually(lambda: running.facts["hold"] == "")


async def test_a_dry_run_orders_nothing(bench: Bench):
    async with bench.planner(dry_run=True) as running:
        await bench.want(PrefillWorker=2)
        await eventually(lambda: running.facts["hold"] == "dry run")
        await eventually(lambda: running.facts["held"])
        place = Place(etcd_url=bench.etcd_url, namespace=bench.namespace)
        shown = planner.as_text(await planner.look(bench.store, place))
        assert "would do: PrefillWorker +1" in shown
        assert await bench.leader() == 0
    assert bench.supervisor.orders == []
    assert (await bench.wanted()).roles == {}


async def test_without_etcd_it_does_not_act(
    nats_url: str, etcd_server: PrivateServer, namespace: str
):
    async with Bench(nats_url, etcd_server.url, namespace, FakeSupervisor()) as bench:
        await bench.worker(D)
        async with bench.planner() as running:
            await eventually(lambda: running.facts["leads"])
            etcd_server.freeze()
            try:
                await eventually(lambda: "etcd is away" in running.facts["hold"], 20)
                for _ in range(10):  # ticks in which it might act
                    bench.overflow(500)
                    await asyncio.sleep(TICK_S)

                async def is_needed() -> bool:
                    """The need lasts only while prompts find no room."""
                    bench.overflow(500)
                    await asyncio.sleep(TICK_S)
                    return "find no room" in _reason(running, P)

                await eventually(is_needed)
            finally:
                etcd_server.thaw()
            assert bench.supervisor.orders == []


async def test_minima_that_need_more_devices_than_the_budget_are_refused(bench: Bench):
    place = Place(etcd_url=bench.etcd_url, namespace=bench.namespace)
    async with bench.planner(prefill_min=3):
        await live_options.change({"Planner": {"decode-min": 5}}, bench.store, place)
        with pytest.raises(ConfigError, match="and decode-min are 9 together, more than"):
            edits = {"Frontend": {"max-queued-tokens": 5}, "Planner": {"decode-min": 6}}
            await live_options.change(edits, bench.store, place)
        assert await live_options.read(bench.store, bench.namespace, "Frontend") == {}


async def test_what_cannot_be_reached_is_shown_and_given_up_by_setting_the_present_number(
    bench: Bench,
):
    place = Place(etcd_url=bench.etcd_url, namespace=bench.namespace)
    bench.supervisor.devices_each = 1
    bench.supervisor.devices_free = 0
    async with bench.planner() as running:
        await eventually(lambda: running.facts["roles"])
        await planner.set_counts(bench.store, place, {P: 3})
        await eventually(lambda: "no device is free" in _reason(running, P))
        shown = planner.as_text(await planner.look(bench.store, place))
        assert "set by an operator, not reached yet: PrefillWorker=3" in shown
        assert "no device is free within the budget; an operator has set 3" in shown
        with pytest.raises(ConfigError, match="no such role; accepted: PrefillWorker, VllmWorker"):
            await planner.set_counts(bench.store, place, {"Nobody": 2})
        await planner.set_counts(bench.store, place, {D: 2})
        await planner.set_counts(bench.store, place, {P: 1})

        async def left(**manual: int) -> None:
            async def there() -> bool:
                return (await bench.wanted()).manual == manual

            await eventually(there)

        await left(VllmWorker=2)
        await eventually(lambda: "an operator" not in _reason(running, P))
        await planner.set_counts(bench.store, place, {D: 1})
        await left()
    assert bench.supervisor.orders == []


async def test_in_a_dry_run_and_without_a_planner_nothing_can_be_set(bench: Bench):
    place = Place(etcd_url=bench.etcd_url, namespace=bench.namespace)
    with pytest.raises(StartupError, match="no planner runs"):
        await planner.set_counts(bench.store, place, {P: 2})
    async with bench.planner(dry_run=True) as running:
        await eventually(lambda: running.facts["roles"])
        with pytest.raises(StartupError, match="dry-run"):
            await planner.set_counts(bench.store, place, {P: 2})


def _reason(running, component: str) -> str:
    roles = {role["component"]: role["reason"] for role in running.facts["roles"]}
    return roles.get(component, "")
