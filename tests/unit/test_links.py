"""A prefill worker's links: tried before use, kept in the store, given up and found again."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from dynamo_lite.disagg.prefill.peer_links import PeerLinks
from dynamo_lite.engine.base import LinkReport
from dynamo_lite.policy.backoff import Backoff
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.errors import DynamoLiteError, IncompatiblePeer, Unavailable
from dynamo_lite.protocol.prefill import decode_listen
from dynamo_lite.protocol.records import (
    EngineMetadata,
    LinkRecord,
    encode_engine,
)
from dynamo_lite.runtime.process.component import Host, ProcessSpec
from dynamo_lite.runtime.process.stop import StopRequest
from dynamo_lite.simulation.servers.memory import MemoryMessaging, MemoryStore
from dynamo_lite.transfer.directory import MetadataDirectory
from tests.builders import engine_metadata, eventually, rank_metadata

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

GOOD = LinkReport(None, 2, 0.5, 0.0625)


class Engine:
    """A prefill engine. findings: by decode engine; the last one stays. may_end: unset, a
    link test goes on."""

    def __init__(self) -> None:
        self.findings: dict[str, list[LinkReport | DynamoLiteError]] = {}
        self.tried: list[str] = []
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.forgotten: list[str] = []

    def forget(self, engine_ids: Sequence[str]) -> None:
        self.forgotten += engine_ids

    async def test_link(self, target: EngineMetadata) -> LinkReport:
        self.tried.append(target.engine_id)
        await self.may_end.wait()
        findings = self.findings.get(target.engine_id, [GOOD])
        finding = findings.pop(0) if len(findings) > 1 else findings[0]
        if isinstance(finding, DynamoLiteError):
            raise finding
        return finding


class Rig:
    def __init__(self, host: Host, store: MemoryStore, messaging: MemoryMessaging):
        self.host, self.store, self.messaging = host, store, messaging
        self.engine, self.directory = Engine(), MetadataDirectory(store, "t")
        self.peer_links = PeerLinks(
            host,
            self.engine,
            self.directory,
            backoff=Backoff(first_s=0.01, longest_s=0.01),
            store_pause_s=0.01,
        )
        self.heard: dict[str, list[float]] = {}

    async def add(self, engine_id: str, lease_id: int = 7) -> EngineMetadata:
        target = engine_metadata(engine_id, lease_id, ranks=(rank_metadata(),))
        key = names.nixl_metadata_key("t", engine_id)
        await self.store.put(key, encode_engine(target))
        return target

    @asynccontextmanager
    async def listening(self, engine_id: str) -> AsyncIterator[None]:
        """The decode worker of this engine."""

        async def hear(payload: bytes) -> bytes:
            listen = decode_listen(payload)
            assert listen.writer_lease_id == self.host.lease.id
            self.heard.setdefault(engine_id, []).append(listen.for_s)
            return b""

        async with self.messaging.serve(names.listen_subject("t", engine_id), hear):
            yield

    async def records(self) -> dict[str, LinkRecord]:
        found = await self.store.get_prefix(names.links_prefix("t"))
        return {key: decode_json(value, LinkRecord) for key, value in found.items()}

    def key(self, engine_id: str) -> str:
        return f"t/links/{self.host.lease.id:x}:{engine_id}"

    async def recorded(self, engine_id: str, *, ok: bool) -> LinkRecord:
        async with asyncio.timeout(10):
            while True:
                record = (await self.records()).get(self.key(engine_id))
                if record is not None and record.ok is ok:
                    return record
                await asyncio.sleep(0.002)

    async def gone(self, engine_id: str) -> None:
        async with asyncio.timeout(10):
            while self.key(engine_id) in await self.records():
                await asyncio.sleep(0.002)

    def counted(self, outcome: str) -> float:
        labels = {"outcome": outcome}
        name = "dynamo_lite_preflights_total"
        return self.host.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    spec = ProcessSpec(
        namespace="t", component="PrefillWorker", instance=0, nats_url="", etcd_url="", state_dir=""
    )
    store, messaging = MemoryStore(), MemoryMessaging()
    async with store.lease(10.0) as lease:
        host = Host(
            spec,
            store=store,
            messaging=messaging,
            lease=lease,
            registry=CollectorRegistry(),
            report=lambda line: None,
            stop=StopRequest(),
        )
        rig = Rig(host, store, messaging)
        try:
            async with rig.listening("d1"), rig.listening("d2"):
                yield rig
        finally:
            await host.cancel_tasks()
    assert await rig.records() == {}  # with the lease


async def test_engines_are_met_as_they_come_and_what_was_found_is_in_the_store(rig: Rig):
    await rig.add("d1", 7)
    rig.host.spawn(rig.peer_links.run(), "peer_links")
    first = await rig.recorded("d1", ok=True)
    await rig.add("d2", 8)
    second = await rig.recorded("d2", ok=True)
    lease = rig.host.lease.id
    wanted = LinkRecord(
        prefill_lease_id=lease,
        engine_id="d1",
        decode_lease_id=7,
        ok=True,
        lanes=2,
        contact_s=0.5,
        round_trip_s=0.0625,
        checked_at=first.checked_at,
    )
    assert first == wanted and first.checked_at > 0
    assert (second.engine_id, second.decode_lease_id) == ("d2", 8)
    assert rig.engine.tried == ["d1", "d2"] and rig.counted("ok") == 2


async def test_a_decode_engine_listens_while_it_is_tried_and_no_longer(rig: Rig):
    target = await rig.add("d1")
    assert await rig.peer_links.usable(target) is None
    assert rig.heard["d1"] == [3.0, 0.0]


async def test_the_prefill_engine_forgets_an_engine_whose_record_is_gone(rig: Rig):
    """Its worker's own record may be seen to go only later."""
    await rig.add("d1")
    rig.host.spawn(rig.peer_links.run(), "peer_links")
    await rig.recorded("d1", ok=True)
    await rig.store.delete(names.nixl_metadata_key("t", "d1"))
    await eventually(lambda: rig.engine.forgotten == ["d1"])


async def test_a_job_waits_for_the_first_try(rig: Rig):
    rig.engine.may_end.clear()
    target = await rig.add("d1")
    waiting = asyncio.create_task(rig.peer_links.usable(target))
    await eventually(lambda: rig.engine.tried)
    assert not waiting.done() and await rig.records() == {}
    rig.engine.may_end.set()
    assert await waiting is None
    assert await rig.peer_links.usable(target) is None and rig.engine.tried == ["d1"]


async def test_a_pair_that_fails_is_not_used_others_are(rig: Rig):
    rig.engine.findings["d1"] = [LinkReport("rank 0: connection reset", 1)]
    one, two = await rig.add("d1"), await rig.add("d2")
    assert await rig.peer_links.usable(one) == "rank 0: connection reset"
    assert await rig.peer_links.usable(two) is None
    assert (await rig.recorded("d1", ok=False)).detail == "rank 0: connection reset"
    await rig.recorded("d2", ok=True)


async def test_it_is_tried_again_until_it_works(rig: Rig):
    bad = LinkReport("rank 0: connection reset", 1)
    rig.engine.findings["d1"] = [bad, Unavailable("no engine"), GOOD]
    target = await rig.add("d1")
    assert await rig.peer_links.usable(target) == "rank 0: connection reset"
    await rig.recorded("d1", ok=True)
    assert await rig.peer_links.usable(target) is None
    assert (rig.counted("failed"), rig.counted("ok")) == (2, 1)


async def test_whoever_does_not_listen_is_not_tried(rig: Rig):
    target = await rig.add("d3")
    failure = await rig.peer_links.usable(target)
    assert failure and "no process serves" in failure
    assert rig.engine.tried == []
    async with rig.listening("d3"):
        await rig.recorded("d3", ok=True)


async def test_engines_that_do_not_fit_are_not_tried_again(rig: Rig):
    rig.engine.findings["d1"] = [IncompatiblePeer("d1", "dtype: 'bf16' here, 'f32' there")]
    target = await rig.add("d1")
    assert await rig.peer_links.usable(target) == "dtype: 'bf16' here, 'f32' there"
    await rig.recorded("d1", ok=False)
    # Time for many tries of one that only failed.
    other = await rig.add("d2")
    rig.engine.findings["d2"] = [LinkReport("broken")]
    await rig.peer_links.usable(other)
    await eventually(lambda: rig.engine.tried.count("d2") > 5)
    assert rig.engine.tried.count("d1") == 1 and rig.counted("incompatible") == 1


@pytest.mark.parametrize("ok", [True, False])
async def test_the_record_goes_when_the_engine_has_left(rig: Rig, ok: bool):
    rig.engine.findings["d1"] = [GOOD if ok else LinkReport("broken")]
    rig.host.spawn(rig.peer_links.run(), "peer_links")
    await rig.add("d1", 7)
    await rig.add("d2", 8)
    await rig.recorded("d1", ok=ok)
    await rig.recorded("d2", ok=True)
    await rig.store.delete(names.nixl_metadata_key("t", "d1"))
    await rig.gone("d1")
    rig.peer_links.forget_leases(frozenset({8}))
    await rig.gone("d2")


async def test_the_record_of_an_engine_that_comes_back_during_a_test_stays(rig: Rig):
    rig.engine.may_end.clear()
    target = await rig.add("d1", 7)
    before = asyncio.create_task(rig.peer_links.usable(target))
    await eventually(lambda: rig.engine.tried == ["d1"])
    old, rig.engine.may_end = rig.engine.may_end, asyncio.Event()
    rig.engine.may_end.set()
    rig.peer_links.forget_leases(frozenset({7}))
    rig.engine.findings["d1"] = [IncompatiblePeer("d1", "broken")]
    assert await rig.peer_links.usable(target) == "broken"
    await rig.recorded("d1", ok=False)
    old.set()
    await before
    await eventually(lambda: [t.get_name() for t in asyncio.all_tasks()].count("link d1") == 1)
    assert rig.key("d1") in await rig.records()


async def test_whoever_waits_for_an_engine_that_leaves_is_told(rig: Rig):
    rig.engine.may_end.clear()
    target = await rig.add("d1", 7)
    waiting = asyncio.create_task(rig.peer_links.usable(target))
    await eventually(lambda: rig.engine.tried)
    rig.peer_links.forget_leases(frozenset({7}))
    rig.engine.findings["d1"] = [Unavailable("the peer is gone")]
    rig.engine.may_end.set()
    assert await waiting == "the peer is gone"
    assert await rig.records() == {}


async def test_a_new_incarnation_is_tried_for_itself(rig: Rig):
    rig.engine.findings["d1"] = [LinkReport("broken")]
    assert await rig.peer_links.usable(await rig.add("d1", 7)) == "broken"
    assert await rig.peer_links.usable(await rig.add("d2", 7)) is None


async def test_after_a_failed_write_the_way_is_tried_before_it_is_used_again(rig: Rig):
    target = await rig.add("d1")
    assert await rig.peer_links.usable(target) is None
    await rig.recorded("d1", ok=True)
    rig.engine.findings["d1"] = [LinkReport("rank 0: connection reset")]
    rig.peer_links.retest("d1")
    assert await rig.peer_links.usable(target) == "rank 0: connection reset"
    await rig.recorded("d1", ok=False)


async def test_an_outage_of_the_store_delays_the_record_only(rig: Rig):
    target = await rig.add("d1")
    await rig.directory.get("d1")
    rig.store.set_available(False)
    assert await rig.peer_links.usable(target) is None
    rig.store.set_available(True)
    await rig.recorded("d1", ok=True)


async def test_a_malformed_engine_is_left_out(rig: Rig):
    await rig.store.put(names.nixl_metadata_key("t", "d2"), b"{}")
    rig.host.spawn(rig.peer_links.run(), "peer_links")
    await rig.add("d1")
    await rig.recorded("d1", ok=True)
    assert rig.engine.tried == ["d1"]


async def test_the_start_waits_until_engines_that_are_there_are_tried_and_recorded(rig: Rig):
    rig.engine.findings["d2"] = [LinkReport("rank 0: connection reset")]
    rig.engine.may_end.clear()
    await rig.add("d1")
    await rig.add("d2")
    rig.host.spawn(rig.peer_links.run(), "peer_links")
    waiting = asyncio.create_task(rig.peer_links.first_tries(10.0))
    await eventually(lambda: len(rig.engine.tried) == 2)
    assert not waiting.done() and await rig.records() == {}
    rig.engine.may_end.set()
    assert await waiting == []
    assert {key: link.ok for key, link in (await rig.records()).items()} == {
        rig.key("d1"): True,
        rig.key("d2"): False,
    }


async def test_the_start_waits_for_no_engine_that_comes_later_or_is_not_there(rig: Rig):
    rig.host.spawn(rig.peer_links.run(), "peer_links")
    assert await rig.peer_links.first_tries(10.0) == []
    rig.engine.may_end.clear()
    await rig.add("d1")
    await eventually(lambda: rig.engine.tried)
    rig.engine.may_end.set()


async def test_the_start_waits_only_so_long_for_an_engine_that_hangs(rig: Rig):
    rig.engine.may_end.clear()
    await rig.add("d1")
    rig.host.spawn(rig.peer_links.run(), "peer_links")
    await eventually(lambda: rig.engine.tried)
    assert await rig.peer_links.first_tries(0.05) == ["d1"]
    rig.engine.may_end.set()
    await rig.recorded("d1", ok=True)  # it is tried further


async def test_the_start_waits_only_so_long_for_a_store_that_is_away(
    rig: Rig, caplog: pytest.LogCaptureFixture
):
    rig.store.set_available(False)
    rig.host.spawn(rig.peer_links.run(), "peer_links")
    assert await rig.peer_links.first_tries(0.05) == []
    assert "the store did not list decode engines within 0.05 s" in caplog.text
    rig.store.set_available(True)


async def test_it_is_hopeless_while_no_engine_can_be_given_kv(rig: Rig):
    assert not rig.peer_links.hopeless, "there is none: nothing will be asked for"
    bad = LinkReport("rank 0: connection reset")
    rig.engine.findings |= {"d1": [bad], "d2": [bad]}
    one = await rig.add("d1")
    rig.engine.may_end.clear()
    waiting = asyncio.create_task(rig.peer_links.usable(one))
    await eventually(lambda: rig.engine.tried)
    assert not rig.peer_links.hopeless, "it is not known yet"
    rig.engine.may_end.set()
    await waiting
    assert rig.peer_links.hopeless
    rig.engine.findings["d2"] = [bad, bad, GOOD]
    await rig.peer_links.usable(await rig.add("d2"))
    assert rig.peer_links.hopeless
    await rig.recorded("d2", ok=True)
    assert not rig.peer_links.hopeless
