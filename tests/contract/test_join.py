"""`dynamo-lite join` on a real etcd: when an engine has a record, and how it is drained."""

import asyncio
import os
import signal

import pytest

from dynamo_lite.protocol import names
from dynamo_lite.protocol.records import EndpointRecord, StockEngine
from dynamo_lite.runtime.store import Lease, Store
from tests.builders import eventually
from tests.joining import Cluster
from tests.servers import PrivateServer
from tests.twins.servers import MemoryStore

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


async def registered(c: Cluster) -> EndpointRecord:
    """The decode engine's record, once there is one."""

    async def record() -> EndpointRecord | None:
        return (await c.records()).get("DecodeEngine")

    return await eventually(record)


async def test_a_record_says_how_an_engine_is_used(c: Cluster):
    engine = await c.engine("prefill", "mooncake", model="of-mine")
    joined = await c.join(
        engine, protocol="mooncake", transfer_host="127.0.0.1", transfer_port=engine.port
    )
    record = (await c.records())["PrefillEngine"]
    assert f"{record.lease_id:x}" == joined.lease
    assert (record.endpoint, record.model, record.status_url) == (
        *("http", "of-mine"),
        joined.ready["status_url"],
    )
    assert record.transport.stream == f"127.0.0.1:{engine.port}"
    assert record.engine == StockEngine(
        url=engine.url,
        role="prefill",
        protocol="mooncake",
        transfer_host="127.0.0.1",
        transfer_port=engine.port,
    )
    health = await c.health(joined)
    assert health["ok"] is True and health["state"] == "ready"
    assert (health["role"], health["protocol"], health["model"]) == (
        *("prefill", "mooncake", "of-mine"),
    )
    # It uses no broker, so none is missing.
    assert "nats_connected" not in health


@pytest.mark.parametrize("stops", [True, False])
async def test_only_the_requests_of_an_engine_that_runs_are_waited_for(c: Cluster, stops: bool):
    """Within the grace."""
    engine = await c.engine("decode")
    joined = await c.join(engine, grace_s=60.0 if stops else 0.5)
    engine.load = (0, 1)
    if stops:
        await engine.stop()
    await joined.revoke()
    assert await joined.end() == 0


async def test_an_unhealthy_engine_has_no_record_until_it_is_healthy_again(c: Cluster):
    engine = await c.engine("decode")
    joined = await c.join(engine)
    lease = joined.lease
    engine.healthy = False
    await c.gone("DecodeEngine")
    health = await c.health(joined)
    assert health["ok"] is False and "/health answered 503" in health["checks"]["engine"]
    engine.healthy = True
    assert f"{(await registered(c)).lease_id:x}" == lease
    # A record that went is no revoked lease: a revocation is still noticed.
    await joined.revoke()
    assert await joined.end() == 0


class _SlowStore(MemoryStore):
    """Puts wait while `gate` is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.waiting, self.done = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.gate.set()

    async def put(self, key: str, value: bytes, *, lease: Lease | None = None) -> None:
        if not self.gate.is_set():
            self.waiting.set()
            await self.gate.wait()
            await super().put(key, value, lease=lease)
            return self.done.set()
        await super().put(key, value, lease=lease)


async def _empty(store: Store, prefix: str) -> bool:
    return not await store.get_prefix(prefix)


async def test_a_registration_that_was_under_way_when_the_drain_began_is_undone(c: Cluster):
    engine, store = await c.engine("decode"), _SlowStore()
    prefix = names.components_prefix(c.namespace)
    async with store:
        joined = c.start_join(engine, store=store, grace_s=60.0)
        joined.ready = await joined.until("ready")
        engine.load = (1, 0)
        engine.healthy = False
        await eventually(lambda: _empty(store, prefix))
        store.gate.clear()
        engine.healthy = True
        await store.waiting.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await joined.until("draining")
        store.gate.set()
        await store.done.wait()
        await eventually(lambda: _empty(store, prefix))
        engine.load = (0, 0)
        assert await joined.end() == 0


async def test_it_waits_for_an_engine_that_starts_later(c: Cluster):
    engine = await c.engine("decode")
    await engine.stop()
    running = c.start_join(engine)
    async with asyncio.timeout(10):
        while "waiting for" not in (await running.reports.get()).get("detail", ""):
            pass
    assert await c.records() == {}
    await engine.start()
    await running.until("ready")
    assert "DecodeEngine" in await c.records()


async def test_an_outage_of_etcd_that_a_lease_survives_changes_nothing(
    c: Cluster, etcd_server: PrivateServer
):
    engine = await c.engine("decode")
    joined = await c.join(engine, etcd_url=etcd_server.url, ttl_s=30.0)
    await etcd_server.kill()
    engine.healthy = False
    await c.healthy(joined, lambda h: not h["ok"])
    await etcd_server.restart()
    engine.healthy = True
    await c.healthy(joined, lambda h: h["ok"])
    assert not joined.task.done()


async def test_a_lease_that_expires_ends_the_run_at_once(c: Cluster, etcd_server: PrivateServer):
    """`dynamo-lite join` then begins another run."""
    engine = await c.engine("decode")
    joined = await c.join(engine, etcd_url=etcd_server.url, grace_s=60.0, ttl_s=2.0)
    engine.load = (1, 0)
    await etcd_server.kill()
    assert await joined.end() == 75
