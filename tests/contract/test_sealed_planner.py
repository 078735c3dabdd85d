"""A planner of a graph with a secret, on etcd: who lacks the secret orders nothing."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from dynamo_lite.cli import planner
from dynamo_lite.cli.listing import Place
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode_json
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.protocol.planner import OperationRecord, PauseRecord, TargetRecord
from dynamo_lite.runtime.sealed_records import RecordSeals
from tests.builders import eventually, graph_secret
from tests.contract.planning import Bench, D, FakeSupervisor, P, Running

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


@pytest.fixture
async def bench(
    nats_url: str, etcd_url: str, namespace: str, tmp_path: Path
) -> AsyncIterator[Bench]:
    """Two decode workers and one prefill worker."""
    graph_secret(tmp_path / "secret")
    supervisor = FakeSupervisor()
    supervisor.ready[D] = 2
    async with Bench(nats_url, etcd_url, namespace, supervisor, tmp_path / "secret") as bench:
        for component in (P, D, D):
            await bench.worker(component)
        yield bench


def forged_records(bench: Bench) -> dict[str, bytes]:
    """Orders to remove workers and to stop the planner, with no seal."""
    victim = max(bench.leases)
    target = TargetRecord(counts={D: 1}, version=1000, by="x", reason="", manual={D: 1})
    removal = OperationRecord(
        id=1000, kind="remove", component=D, phase="ordered", count=1, lease_id=victim, at=1e10
    )
    return {
        names.planner_target_key(bench.namespace): encode_json(target),
        names.planner_operation_key(bench.namespace, 1000): encode_json(removal),
        names.planner_pause_key(bench.namespace): encode_json(PauseRecord(by="x")),
    }


async def more_looks(bench: Bench) -> None:
    """Two whole ticks have passed."""
    before = bench.supervisor.looks
    await eventually(lambda: bench.supervisor.looks >= before + 4)


async def refuses(running: Running, *keys: str) -> None:
    await eventually(lambda: running.facts["refused"].keys() == {*keys})


async def test_a_forged_order_is_not_carried_out(bench: Bench):
    """Records without a seal. `tests/unit/test_planner_authentic.py` tests all other bad seals."""
    forged = forged_records(bench)
    for key, data in forged.items():
        await bench.store.put(key, data)
    place = Place(etcd_url=bench.etcd_url, namespace=bench.namespace)
    async with bench.planner() as running:
        await refuses(running, *forged)
        await eventually(lambda: running.facts["leads"] and not running.facts["hold"])
        await more_looks(bench)
        assert bench.supervisor.orders == []
        assert running.facts["manual"] == {} and running.facts["operations"] == 0
        shown = planner.as_text(await planner.look(bench.store, place, bench.seals))
        for key in forged:
            assert f"! ignored: {key}: not authentic" in shown
            assert f"! the planner ignores {key}: not authentic" in shown
        # The same number by somebody with the secret is reached.
        with pytest.raises(StartupError, match="this graph has a secret"):
            await planner.set_counts(bench.store, place, {D: 1})
        with pytest.raises(StartupError, match="this graph has a secret"):
            await planner.pause(bench.store, place, "")
        await planner.set_counts(bench.store, place, {D: 1}, bench.seals)
        await eventually(lambda: bench.supervisor.ready[D] == 1)
    assert [what for what, _ in bench.supervisor.orders] == ["remove"]


async def test_an_order_is_not_carried_out_twice(bench: Bench):
    key = names.planner_target_key(bench.namespace)
    place = Place(etcd_url=bench.etcd_url, namespace=bench.namespace)

    async def reach(number: int) -> None:
        await planner.set_counts(bench.store, place, {D: number}, bench.seals)
        await eventually(lambda: bench.supervisor.ready[D] == number)
        await eventually(lambda: not running.facts["manual"])

    async with bench.planner() as running:
        await eventually(lambda: running.facts["roles"] and running.facts["leads"])
        await reach(1)
        await reach(2)
        orders = list(bench.supervisor.orders)
        old = TargetRecord(counts={D: 1}, version=1, by="x", reason="", manual={D: 1})
        await bench.store.put(key, bench.seals.sealed(key, encode_json(old)))
        await refuses(running, key)
        await more_looks(bench)
        assert bench.supervisor.orders == orders
        # What is set then is above what the planner has seen.
        await reach(3)
        await refuses(running)


async def test_a_change_that_was_recorded_is_not_resumed_when_it_is_over(bench: Bench):
    bench.supervisor.instant = False
    prefix = names.planner_operations_prefix(bench.namespace)
    async with AsyncExitStack() as first:
        running = await first.enter_async_context(bench.planner())
        await eventually(lambda: running.facts["leads"], 20)
        async with bench.planner(1) as heir:
            await bench.want(VllmWorker=3)

            async def under_way() -> bool:
                return any(each.phase == "asked" for each in await bench.operations())

            await eventually(under_way)
            [(key, recorded)] = (await bench.store.get_prefix(prefix)).items()
            bench.supervisor.finish_starts()
            await bench.until_settled(VllmWorker=3)
            await bench.store.put(key, recorded)
            await refuses(heir, key)
            await first.aclose()
            await eventually(lambda: heir.facts["leads"] and not heir.facts["hold"], 20)
            await more_looks(bench)
            assert heir.facts["operations"] == 0
    assert len(bench.supervisor.orders) == 1


async def test_what_is_under_way_is_resumed_by_the_next_planner(bench: Bench):
    """It is sealed, and the next planner believes it."""
    bench.supervisor.stop_at = "add after"
    async with bench.planner():
        await bench.want(VllmWorker=3)
        await bench.supervisor.stopped.wait()
    async with bench.planner(1):
        await bench.until_settled(20, VllmWorker=3)
    assert len(bench.supervisor.taken("add")) == 1


async def test_a_replaced_secret_leaves_a_pause_that_was_repeated_and_what_is_ordered_since(
    bench: Bench, tmp_path: Path
):
    """The record of what was wanted has the old seal, and the planner writes a new one."""
    await bench.want(VllmWorker=2)
    place = Place(etcd_url=bench.etcd_url, namespace=bench.namespace)
    await planner.pause(bench.store, place, "", bench.seals)
    old = bytes.fromhex((tmp_path / "secret").read_text())
    both = RecordSeals(graph_secret(tmp_path / "secret", b"n" * 32, old))
    await planner.pause(bench.store, place, "again", both)
    bench.seals = RecordSeals(graph_secret(tmp_path / "secret", b"n" * 32))
    target = names.planner_target_key(bench.namespace)
    async with bench.planner() as running:
        await eventually(lambda: running.facts["hold"] == "paused: again")
        await refuses(running, target)
        await planner.set_counts(bench.store, place, {D: 3}, bench.seals)
        await bench.until_settled(VllmWorker=3)
        await refuses(running)
    record = await bench.target_record()
    assert record is not None and record.counts == {D: 3}
    assert len(bench.supervisor.orders) == 1
