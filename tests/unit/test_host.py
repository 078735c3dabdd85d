"""The life of one process, on the in-process twins and on real servers."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from subprocess import PIPE

import pytest

from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.protocol.names import components_prefix, endpoint_subject
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.runtime.process.stop import StopRequest, stop_on_signals
from dynamo_lite.runtime.store import Lease, LeaseLoss
from tests.builders import eventually
from tests.twins.servers import MemoryStore
from tests.unit.process_run import RefusingStore, Run

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


@pytest.fixture
def run() -> Run:
    return Run()


async def test_sigterm_drains(run: Run) -> None:
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


class _SilentStore(MemoryStore):
    """While it is silent, puts are carried out without an answer."""

    silent = False

    async def put(self, key: str, value: bytes, *, lease: Lease | None = None) -> None:
        await super().put(key, value, lease=lease)
        if self.silent:
            await asyncio.Event().wait()


async def test_an_endpoint_whose_registration_was_cut_off_is_deregistered() -> None:
    run = Run(store := _SilentStore())
    exit_code = run.start()
    await run.until("ready")
    host = run.worker.host
    assert host is not None
    store.silent = True
    registering = asyncio.create_task(host.register("second"))
    while len(await store.get_prefix(components_prefix("n"))) < 2:
        await asyncio.sleep(0)
    registering.cancel()
    await asyncio.wait([registering])
    await host.deregister()
    assert await store.get_prefix(components_prefix("n")) == {}
    os.kill(os.getpid(), signal.SIGTERM)
    assert await exit_code == 0


@pytest.mark.parametrize("ignored", [True, False])
async def test_a_hangup_is_a_stop_unless_it_is_ignored(ignored: bool) -> None:
    """`nohup` ignores it."""
    stop = StopRequest()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with stop_on_signals(stop, again=lambda: None):
            os.kill(os.getpid(), signal.SIGHUP)
            # Signals come in their order.
            os.kill(os.getpid(), signal.SIGTERM)
            await stop.wait()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert stop.reason == ("SIGTERM" if ignored else "SIGHUP")


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


@pytest.mark.parametrize("store", [MemoryStore, KeysFirst])
async def test_a_revoked_lease_drains_and_exits_0(store: type[MemoryStore]) -> None:
    run = Run(store=store(), lease_ttl_s=60.0)
    exit_code = run.start()
    await run.store.revoke(int((await run.until("ready"))["lease"], 16))
    assert (await run.until("draining"))["reason"] == "lease revoked"
    assert await exit_code == 0
    assert run.worker.calls == ["start", "drain 30", "close"]


async def test_a_lease_that_expires_during_the_start_is_its_cause() -> None:
    run = Run(lease_ttl_s=1.0)

    async def hang(_: Host) -> None:
        run.store.set_available(False)
        await asyncio.Event().wait()

    run.worker.on_start = hang
    exit_code = run.start()
    assert (await run.until("failed"))["error"] == "lease expired: etcd was out of reach"
    assert await exit_code == 75


async def test_a_registration_that_was_not_deleted_is_deleted_while_it_drains() -> None:
    store = RefusingStore()
    run = Run(store)
    seen: list[bool] = []

    async def until_gone() -> None:
        async def gone() -> bool:
            return not await store.get_prefix("n/")

        seen.append(await gone())
        await eventually(gone)
        seen.append(True)

    run.worker.on_drain = until_gone
    async with run.ready():
        store.deletes = 3
    assert seen == [False, True]


async def test_a_start_survives_a_store_that_is_away_for_a_moment() -> None:
    store = RefusingStore()
    store.puts = 2
    async with Run(store).ready():
        assert store.puts == 0 and await store.get_prefix("n/")


async def test_all_keys_come_back_to_a_store_that_was_wiped_and_dies_again() -> None:
    store = RefusingStore()
    run = Run(store, lease_ttl_s=60.0)
    async with run.ready():
        await run.host.keys.hold("n/other", b"1")
        before = await store.get_prefix("n/")
        store.set_available(False)
        store.wipe()
        store.puts = 2
        store.set_available(True)
        async with asyncio.timeout(5), store.watch("n/") as events:
            while await store.get_prefix("n/") != before:
                await anext(events)
        assert len(before) == 2 and store.puts == 0
        assert run.host.lease.loss is None
        await run.host.keys.release("n/other")
    assert await store.get_prefix("n/") == {}


@pytest.mark.parametrize("error", [StartupError("no model"), KeyError("bug")])
async def test_a_failed_start_exits_1(error: Exception, run: Run) -> None:

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


async def test_a_stop_interrupts_the_start(run: Run) -> None:

    async def hang(_: Host) -> None:
        await asyncio.Event().wait()

    run.worker.on_start = hang
    exit_code = run.start()
    await run.until("starting")
    await eventually(lambda: run.worker.calls)
    os.kill(os.getpid(), signal.SIGINT)
    assert await exit_code == 0
    assert run.worker.calls == ["start", "close"]


async def test_a_failed_owned_task_exits_70(run: Run) -> None:
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


async def test_a_failing_drain_still_closes(run: Run) -> None:

    async def fail() -> None:
        raise KeyError("drain")

    run.worker.on_drain = fail
    exit_code = run.start()
    await run.until("ready")
    run.host.stop("enough", 3)
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
    run.host.stop("a test")
    await closing.wait()
    process.cancel()
    await asyncio.wait([process], timeout=5)
    assert process.cancelled()
    # The fixture finds tasks that are left.


def test_a_process_whose_event_loop_hangs_is_ended_and_says_where_but_no_stopped_one():
    program = """
import asyncio, os, signal, time
from dynamo_lite.runtime.process import stop
stop.HUNG_S = 1.0
async def main():
    await asyncio.sleep(1.5)
    os.kill(os.getpid(), signal.SIGSTOP)
    await asyncio.sleep(1.5)
    print("it ran", flush=True)
    time.sleep(60)
stop.run_loop(main())
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=PIPE, stderr=PIPE)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    time.sleep(2.0)
    process.send_signal(signal.SIGCONT)
    out, errors = process.communicate(timeout=30)
    assert (process.returncode, out) == (1, b"it ran\n") and b"in main" in errors
