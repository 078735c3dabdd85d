"""The life of one process, on the in-process twins and on real servers."""

import asyncio
import contextlib
import os
import signal
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.errors import StartupError, StoreUnavailable
from dynamo_lite.protocol.names import components_prefix, endpoint_subject
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.process.component import Host, ProcessSpec
from dynamo_lite.runtime.process.host import ProcessEnvironment, run_process
from dynamo_lite.runtime.store import Delete, Lease, LeaseLoss, Put, Snapshot
from tests.builders import eventually
from tests.simulation.servers.memory import MemoryMessaging, MemoryStore

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


class Worker:
    """A component that notes its calls; hooks make it misbehave."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.host: Host | None = None
        self.on_start: Callable[[Host], Any] | None = None
        self.on_drain: Callable[[], Any] | None = None
        self.on_close: Callable[[], Any] | None = None
        self.healthy = True

    async def start(self, host: Host) -> dict[str, Any]:
        self.calls.append("start")
        self.host = host
        if self.on_start:
            await self.on_start(host)
        await host.register("generate", stream="127.0.0.1:9", model="m")
        return {"url": "http://here"}

    async def drain(self, grace_s: float) -> None:
        self.calls.append(f"drain {grace_s:g}")
        if self.on_drain:
            await self.on_drain()

    async def close(self) -> None:
        self.calls.append("close")
        if self.on_close:
            await self.on_close()

    def health(self) -> dict[str, Any]:
        return {"ok": self.healthy, "jobs": 3}


class Run:
    """A process under test: its reports, and its exit code."""

    def __init__(self, store: MemoryStore | None = None, **spec: Any):
        self.store = store or MemoryStore()
        self.messaging = MemoryMessaging()
        self.worker = Worker()
        self.reports: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        options = {"nats_url": "nats://x", "etcd_url": "http://x", "lease_ttl_s": 5.0} | spec
        self.spec = ProcessSpec(
            namespace="n", component="Worker", instance=0, state_dir="/nowhere", **options
        )

    def start(self) -> asyncio.Task[int]:
        return asyncio.create_task(
            run_process(
                self.spec,
                self.worker,
                self.reports.put_nowait,
                ProcessEnvironment(
                    open_store=lambda _: contextlib.nullcontext(self.store),
                    open_messaging=lambda *_: contextlib.nullcontext(self.messaging),
                ),
            )
        )

    async def until(self, state: str) -> dict[str, Any]:
        async with asyncio.timeout(15):
            while (report := await self.reports.get())["state"] != state:
                pass
        return report


async def get(url: str) -> tuple[int, bytes]:
    def fetch() -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    return await asyncio.to_thread(fetch)


def test_a_spec_survives_json() -> None:
    spec = Run(config={"a": [1]}, engine_args=["--model", "m"], inner={"P": {"b": 1}}).spec
    assert msgspec.json.decode(msgspec.json.encode(spec), type=ProcessSpec) == spec


async def test_sigterm_drains() -> None:
    run = Run()
    keys_at_drain: list[dict[str, bytes]] = []

    async def look() -> None:
        keys_at_drain.append(await run.store.get_prefix("n/"))

    run.worker.on_drain = look
    exit_code = run.start()
    ready = await run.until("ready")
    assert (ready["pid"], ready["url"]) == (os.getpid(), "http://here")
    ((key, value),) = (await run.store.get_prefix(components_prefix("n"))).items()
    record = decode_json(value, EndpointRecord)
    assert key == f"n/components/Worker/generate:{ready['lease']}"
    assert record.transport.nats_tcp == endpoint_subject(
        "n", "Worker", "generate", int(ready["lease"], 16)
    )
    assert (record.status_url, record.pid, record.model) == (ready["status_url"], os.getpid(), "m")
    os.kill(os.getpid(), signal.SIGTERM)
    assert (await run.until("draining"))["reason"] == "SIGTERM"
    assert await exit_code == 0
    assert run.worker.calls == ["start", "drain 30", "close"]
    assert keys_at_drain == [{}]


async def test_status_is_served() -> None:
    run = Run()
    exit_code = run.start()
    url = (await run.until("ready"))["status_url"]
    status, body = await get(f"{url}/health")
    facts = msgspec.json.decode(body)
    assert (status, facts["ok"], facts["state"], facts["jobs"]) == (200, True, "ready", 3)
    status, body = await get(f"{url}/metrics")
    assert status == 200
    assert b"dynamo_lite_nats_connected 1.0" in body
    run.worker.healthy = False
    assert (await get(f"{url}/health"))[0] == 503
    run.worker.healthy = True
    run.messaging.set_connected(False)
    assert (await get(f"{url}/health"))[0] == 503
    run.messaging.set_connected(True)
    _, body = await get(f"{url}/metrics")
    assert b"dynamo_lite_nats_reconnects_total 1.0" in body
    assert run.worker.host
    run.worker.host.stop("enough")
    assert await exit_code == 0


async def test_a_revoked_lease_drains_and_exits_0() -> None:
    run = Run(lease_ttl_s=60.0)
    exit_code = run.start()
    lease_id = int((await run.until("ready"))["lease"], 16)
    await run.store.revoke(lease_id)
    assert (await run.until("draining"))["reason"] == "lease revoked"
    assert await exit_code == 0
    assert run.worker.calls == ["start", "drain 30", "close"]


class KeysFirst(MemoryStore):
    """Revokes as etcd does: the keys go first, and a look in between finds the lease alive."""

    async def revoke(self, lease_id: int) -> bool:
        lease = self._leases.pop(lease_id)
        answers = iter([None])

        async def verify() -> LeaseLoss | None:
            if next(answers, LeaseLoss.REVOKED) is not None:
                lease.end(LeaseLoss.REVOKED)
            return lease.loss

        lease.verify = verify
        for key in [k for k, entry in self._entries.items() if entry.lease is lease]:
            self._remove(key)
        return True


async def test_a_revocation_is_noticed_though_its_keys_vanish_first() -> None:
    run = Run(store=KeysFirst(), lease_ttl_s=60.0)
    exit_code = run.start()
    await run.store.revoke(int((await run.until("ready"))["lease"], 16))
    assert (await run.until("draining"))["reason"] == "lease revoked"
    assert await exit_code == 0


async def test_an_expired_lease_exits_75() -> None:
    run = Run(lease_ttl_s=1.0)
    exit_code = run.start()
    await run.until("ready")
    run.store.set_available(False)
    assert (await run.until("draining"))["reason"] == "lease expired"
    assert await exit_code == 75


async def test_a_deleted_key_is_put_back() -> None:
    run = Run()
    exit_code = run.start()
    await run.until("ready")
    (key,) = await run.store.get_prefix("n/")
    async with run.store.watch(key) as events:
        await anext(events)
        await run.store.delete(key)
        async with asyncio.timeout(5):
            await anext(events)
            await anext(events)
    assert await run.store.get(key)
    assert run.worker.host
    run.worker.host.stop("enough")
    assert await exit_code == 0
    assert await run.store.get_prefix("n/") == {}


class Refusals(MemoryStore):
    """Deletes nothing for so many times."""

    def __init__(self) -> None:
        super().__init__()
        self.refusals = 0
        self.deletes: list[str] = []

    async def delete(self, key: str) -> bool:
        self.deletes.append(key)
        if self.refusals:
            self.refusals -= 1
            raise StoreUnavailable("its server was just killed")
        return await super().delete(key)


async def test_a_registration_that_was_not_deleted_is_deleted_while_it_drains() -> None:
    store = Refusals()
    run = Run(store)
    store.refusals = 3
    seen: list[bool] = []

    async def until_gone() -> None:
        async def gone() -> bool:
            return not await store.get_prefix("n/")

        seen.append(await gone())
        await eventually(gone)
        seen.append(True)

    run.worker.on_drain = until_gone
    exit_code = run.start()
    await run.until("ready")
    assert run.worker.host
    run.worker.host.stop("enough")
    assert await exit_code == 0
    assert seen == [False, True]


async def test_each_released_key_is_deleted_and_one_that_is_held_again_stays() -> None:
    store = Refusals()
    run = Run(store)

    async def hold_two(host: Host) -> None:
        await host.keys.hold("n/one", b"1")
        await host.keys.hold("n/two", b"2")

    run.worker.on_start = hold_two
    exit_code = run.start()
    await run.until("ready")
    host = run.worker.host
    assert host
    store.refusals = 2
    assert not await host.keys.release("n/one", "n/two")
    await host.keys.hold("n/one", b"again")

    async def deleted() -> bool:
        return await store.get("n/two") is None

    await eventually(deleted)
    host.stop("enough")
    assert await exit_code == 0
    assert (store.deletes.count("n/one"), store.deletes.count("n/two")) == (1, 2)


async def hold_another(host: Host) -> None:
    await host.keys.hold("n/other", b"1")


async def test_all_keys_come_back_to_a_store_that_was_wiped() -> None:
    run = Run(lease_ttl_s=60.0)
    run.worker.on_start = hold_another
    exit_code = run.start()
    await run.until("ready")
    before = await run.store.get_prefix("n/")
    assert len(before) == 2
    async with run.store.watch("n/") as events, asyncio.timeout(5):
        assert await anext(events) == Snapshot(before)
        run.store.set_available(False)
        run.store.wipe()
        run.store.set_available(True)
        assert await anext(events) == Snapshot({}, lost_data=True)
        assert {(await anext(events)).key for _ in before} == set(before)
    assert await run.store.get_prefix("n/") == before
    assert run.worker.host
    await run.worker.host.keys.release("n/other")
    run.worker.host.stop("enough")
    assert await exit_code == 0
    assert await run.store.get_prefix("n/") == {}


@pytest.mark.parametrize("released", [0, 1])
async def test_keys_come_back_whichever_was_released_before(released: int) -> None:
    run = Run(lease_ttl_s=60.0)
    run.worker.on_start = hold_another
    exit_code = run.start()
    await run.until("ready")
    host = run.worker.host
    assert host is not None
    gone = host.keys.held()[released]
    await host.keys.release(gone)
    (left,) = await run.store.get_prefix("n/")
    async with run.store.watch(left) as events, asyncio.timeout(5):
        await anext(events)
        await run.store.delete(left)
        assert await anext(events) == Delete(left)
        assert isinstance(await anext(events), Put)
    host.stop("enough")
    assert await exit_code == 0


async def test_a_start_survives_a_store_that_is_away_for_a_moment() -> None:
    store = Refusing()
    run = Run(store=store)
    store.refusals = 2
    exit_code = run.start()
    await run.until("ready")
    assert store.refusals == 0 and await store.get_prefix("n/")
    assert run.worker.host
    run.worker.host.stop("enough")
    assert await exit_code == 0


async def test_keys_come_back_though_the_store_dies_again_meanwhile() -> None:
    store = Refusing()
    run = Run(store=store, lease_ttl_s=60.0)
    exit_code = run.start()
    await run.until("ready")
    store.refusals = 2
    store.wipe()
    async with asyncio.timeout(5), store.watch("n/") as events:
        while not await store.get_prefix("n/"):
            await anext(events)
    assert store.refusals == 0
    assert run.worker.host
    run.worker.host.stop("enough")
    assert await exit_code == 0


class Refusing(MemoryStore):
    """refusals: how many puts still fail."""

    refusals = 0

    async def put(self, key: str, value: bytes, *, lease: Lease | None = None) -> None:
        if self.refusals:
            self.refusals -= 1
            raise StoreUnavailable("not now")
        await super().put(key, value, lease=lease)


@pytest.mark.parametrize("error", [StartupError("no model"), KeyError("bug")])
async def test_a_failed_start_exits_1(error: Exception) -> None:
    run = Run()

    async def fail(host: Host) -> None:
        host.progress("loading")
        await host.register("early")
        raise error

    run.worker.on_start = fail
    exit_code = run.start()
    assert str(error) in (await run.until("failed"))["error"]
    assert await exit_code == 1
    assert run.worker.calls == ["start", "close"]
    assert await run.store.get_prefix("n/") == {}


async def test_a_stop_interrupts_the_start() -> None:
    run = Run()

    async def hang(_: Host) -> None:
        await asyncio.Event().wait()

    run.worker.on_start = hang
    exit_code = run.start()
    await run.until("starting")
    await eventually(lambda: run.worker.calls)
    os.kill(os.getpid(), signal.SIGINT)
    assert await exit_code == 0
    assert run.worker.calls == ["start", "close"]


async def test_a_failed_owned_task_exits_70() -> None:
    run = Run()
    broken = asyncio.Event()
    cancelled = asyncio.Event()

    async def crash() -> None:
        await broken.wait()
        raise RuntimeError("engine died")

    async def wait_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def spawn(host: Host) -> None:
        host.spawn(crash(), "pump")
        host.spawn(wait_for_ever(), "other")

    run.worker.on_start = spawn
    exit_code = run.start()
    await run.until("ready")
    broken.set()
    assert (await run.until("draining"))["reason"] == "pump failed: engine died"
    assert await exit_code == 70
    assert run.worker.calls[-1] == "close"
    assert cancelled.is_set()


async def test_a_failing_drain_still_closes() -> None:
    run = Run()

    async def fail() -> None:
        raise KeyError("drain")

    run.worker.on_drain = fail
    exit_code = run.start()
    await run.until("ready")
    assert run.worker.host
    run.worker.host.stop("enough", 3)
    assert await exit_code == 3
    assert run.worker.calls[-1] == "close"


async def test_a_cancel_while_it_closes_ends_its_tasks() -> None:
    async def endless(host: Host) -> None:
        host.spawn(asyncio.Event().wait(), "endless")

    async def close() -> None:
        closing.set()
        await asyncio.Event().wait()

    run, closing = Run(), asyncio.Event()
    run.worker.on_start, run.worker.on_close = endless, close
    process = run.start()
    await run.until("ready")
    assert run.worker.host is not None
    run.worker.host.stop("a test")
    await closing.wait()
    process.cancel()
    await asyncio.wait([process], timeout=5)
    assert process.cancelled()
    # The fixture finds tasks that are left.


async def test_a_missing_server_is_a_failed_start() -> None:
    run = Run()

    @contextlib.asynccontextmanager
    async def missing(_: ProcessSpec):
        raise StartupError("cannot use etcd at http://x")
        yield

    code = await run_process(
        run.spec, run.worker, run.reports.put_nowait, ProcessEnvironment(open_store=missing)
    )
    assert code == 1
    assert (await run.until("failed"))["error"] == "cannot use etcd at http://x"
    assert run.worker.calls == []


async def test_a_revoke_by_another_client_is_noticed_fast(
    nats_url: str, etcd_url: str, namespace: str
) -> None:
    worker = Worker()
    reports: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    noticed = 0.0

    def report(line: dict[str, Any]) -> None:
        nonlocal noticed
        if line["state"] == "draining":
            noticed = time.monotonic()
        reports.put_nowait(line)

    spec = ProcessSpec(
        namespace=namespace,
        component="Worker",
        instance=0,
        nats_url=nats_url,
        etcd_url=etcd_url,
        state_dir="/nowhere",
    )
    exit_code = asyncio.create_task(run_process(spec, worker, report))
    async with asyncio.timeout(15), EtcdStore(etcd_url) as other:
        line = await reports.get()
        while line["state"] != "ready":
            line = await reports.get()
        assert list(await other.get_prefix(components_prefix(namespace)))
        started = time.monotonic()
        assert await other.revoke(int(line["lease"], 16))
        assert await exit_code == 0
    assert noticed - started < 0.5


async def test_an_etcd_outage_longer_than_the_lease_exits_75(nats_url: str, etcd_server) -> None:
    run = Run(nats_url=nats_url, etcd_url=etcd_server.url, lease_ttl_s=2.0)
    exit_code = asyncio.create_task(run_process(run.spec, run.worker, run.reports.put_nowait))
    await run.until("ready")
    await etcd_server.kill()
    assert (await run.until("draining"))["reason"] == "lease expired"
    assert await exit_code == 75


async def test_an_etcd_that_was_wiped_costs_no_process_its_life(nats_url: str, etcd_server) -> None:
    run = Run(nats_url=nats_url, etcd_url=etcd_server.url, lease_ttl_s=10.0)
    run.worker.on_start = hold_another
    exit_code = asyncio.create_task(run_process(run.spec, run.worker, run.reports.put_nowait))
    await run.until("ready")
    async with EtcdStore(etcd_server.url) as other:
        before = await other.get_prefix("n/")
    await etcd_server.kill()
    await etcd_server.restart(wiped=True)
    async with asyncio.timeout(5), EtcdStore(etcd_server.url) as other:
        async with other.watch("n/") as events:
            while await other.get_prefix("n/") != before:
                await anext(events)
    assert len(before) == 2
    assert run.worker.host
    assert run.worker.host.lease.loss is None
    await run.worker.host.keys.release("n/other")
    run.worker.host.stop("enough")
    assert await exit_code == 0


async def test_a_second_signal_ends_the_process_at_once() -> None:
    program = textwrap.dedent(
        """
        import asyncio
        from dynamo_lite.runtime.process.stop import StopRequest, stop_on_signals

        async def main():
            stop = StopRequest()
            with stop_on_signals(stop):
                print("up", flush=True)
                await stop.wait()
                print(stop.reason, flush=True)
                await asyncio.Event().wait()

        asyncio.run(main())
        """
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout
    try:
        async with asyncio.timeout(30):
            assert await process.stdout.readline() == b"up\n"
            process.send_signal(signal.SIGINT)
            assert await process.stdout.readline() == b"SIGINT\n"
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 130
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
