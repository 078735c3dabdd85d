"""A prefill worker's links: used until a transfer fails, left unused for a while, tried again."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dynamo_lite.disagg.prefill.peer_links import PeerLinks
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json, encode_json
from dynamo_lite.protocol.errors import IncompatiblePeer, ProtocolError, StoreUnavailable
from dynamo_lite.protocol.records import EngineMetadata, LinkRecord
from dynamo_lite.runtime.backoff import Backoff
from dynamo_lite.runtime.clock import Clock
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.runtime.process.stop import StopRequest
from tests.builders import engine_metadata, eventually, process_spec, rank_metadata
from tests.twins.servers import MemoryMessaging, MemoryStore

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

#: Longer than any test.
LONG = Backoff(first_s=300.0, longest_s=300.0)
SHORT = Backoff(first_s=0.01, longest_s=0.01)
UNFIT = "dtype: 'bf16' here, 'f32' there"
RESET = "KV transfer with engine d1/0: connection reset"


class Engine:
    """A prefill engine. unfit: decode engines that it must not write to. checked: those that it
    was asked about."""

    def __init__(self) -> None:
        self.unfit: set[str] = set()
        self.checked: list[str] = []

    def check_peer(self, target: EngineMetadata) -> bool:
        self.checked.append(target.engine_id)
        if target.engine_id in self.unfit:
            raise IncompatiblePeer(target.engine_id, UNFIT)
        return target.engine_id != "unreadable"


class Rig:
    def __init__(self, host: Host, store: MemoryStore, printed: list[str]):
        self.host, self.store, self.printed = host, store, printed
        self.engine = Engine()
        self.links = self.made(LONG)
        self.added: set[str] = set()

    def made(self, backoff: Backoff) -> PeerLinks:
        self.host.registry = CollectorRegistry()
        return PeerLinks(self.host, self.engine, backoff=backoff)

    async def run(self, links: PeerLinks | None = None) -> PeerLinks:
        """Follows the engines, and waits until those that `add` has added are known."""
        links = links or self.links
        self.host.spawn(links.run(), "links")
        await eventually(lambda: self.added <= links.known.keys())
        return links

    async def add(self, engine_id: str, lease_id: int = 7) -> EngineMetadata:
        target = engine_metadata(engine_id, lease_id, ranks=(rank_metadata(),))
        key = names.nixl_metadata_key("t", engine_id)
        await self.store.put(key, encode_json(target))
        self.added.add(engine_id)
        return target

    def mark(self, engine_id: str, links: PeerLinks | None = None) -> str:
        return (links or self.links).known[engine_id].mark

    async def leave(self, engine_id: str) -> None:
        await self.store.delete(names.nixl_metadata_key("t", engine_id))

    async def marks(self) -> dict[str, LinkRecord]:
        """In the store, by decode engine."""
        found = await self.store.get_prefix(names.links_prefix("t"))
        for key in found:
            assert key.startswith(f"t/links/{self.host.lease.id:x}:")
        return {key.rpartition(":")[2]: decode_json(v, LinkRecord) for key, v in found.items()}

    async def marked(self, *engine_ids: str) -> dict[str, LinkRecord]:
        """Waits until these have marks in the store, and no other."""
        async with asyncio.timeout(10):
            while (found := await self.marks()).keys() != set(engine_ids):
                await asyncio.sleep(0.002)
        return found


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    store, printed = MemoryStore(), list[str]()
    async with store.lease(10.0) as lease:
        host = Host(
            spec=process_spec("PrefillWorker", namespace="t"),
            store=store,
            messaging=MemoryMessaging(),
            lease=lease,
            registry=CollectorRegistry(),
            report=lambda line: printed.append(line["detail"]),
            stopping=StopRequest(),
            clock=Clock(wall=lambda: 1000.0),
        )
        rig = Rig(host, store, printed)
        try:
            yield rig
        finally:
            await host.tasks.end()
    assert await rig.marks() == {}  # with the lease


async def test_a_link_is_used_until_a_transfer_over_it_fails(rig: Rig):
    await rig.add("d1", 7)
    await rig.add("d2", 8)
    await rig.run()
    assert (rig.mark("d1"), rig.mark("d2"), await rig.marks()) == ("", "", {})
    for why in (RESET, "transfers that fail together are one failure"):
        rig.links.broke("d1", why)
    assert (rig.mark("d1"), rig.mark("d2")) == (RESET, "")
    assert await rig.marked("d1") == {
        "d1": LinkRecord(
            prefill_lease_id=rig.host.lease.id,
            engine_id="d1",
            decode_lease_id=7,
            detail=RESET,
            next_try=1300.0,
        )
    }


async def test_the_mark_ends_and_the_next_job_is_the_try(rig: Rig):
    links = rig.made(SHORT)
    await rig.add("d1")
    await rig.run(links)
    for _ in range(3):
        links.broke("d1", RESET)
        assert rig.mark("d1", links) == RESET
        await eventually(lambda: not rig.mark("d1", links))
        await rig.marked()


async def test_another_failure_marks_it_for_longer_and_success_ends_the_series(
    rig: Rig, caplog: pytest.LogCaptureFixture
):
    links = rig.made(Backoff(first_s=0.01, factor=2.0, longest_s=0.04))
    await rig.add("d1")
    await rig.run(links)

    async def fails() -> str:
        links.broke("d1", RESET)
        await eventually(lambda: not rig.mark("d1", links))
        return caplog.messages[-1]

    said = [await fails() for _ in range(4)]
    links.known["d1"].failures = 0
    said.append(await fails())
    assert said == [
        f"link to engine d1: used again in {s} s: {RESET}" for s in (0.01, 0.02, 0.04, 0.04, 0.01)
    ]


async def test_engines_that_do_not_fit_are_known_before_any_job_and_never_used(rig: Rig):
    rig.engine.unfit = {"d1", "d3"}
    await rig.store.put(names.nixl_metadata_key("t", "d0"), b"{")  # no engine
    await rig.add("d1")
    await rig.add("d2")
    await rig.run()
    marks = await rig.marked("d1")
    assert [(mark.detail, mark.next_try) for mark in marks.values()] == [(UNFIT, None)]
    assert rig.engine.checked == ["d1", "d2"]
    await rig.add("d3")
    await rig.marked("d1", "d3")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        b"not json",
        b'{"engine_id": 3}',
        b"\xff\xfe",
        encode_json(engine_metadata("d2", 7, ranks=(rank_metadata(),))),  # of another engine
    ],
)
async def test_a_malformed_record_raises(rig: Rig, raw: bytes):
    await rig.store.put(names.nixl_metadata_key("t", "d1"), raw)
    with pytest.raises(ProtocolError):
        await rig.links.look_up("d1")
    await rig.run()
    with pytest.raises(ProtocolError):
        await rig.links.look_up("d1")
    await rig.add("d1")
    await eventually(lambda: "d1" in rig.links.known)


async def test_the_mark_of_an_engine_that_comes_back_stays(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    """Also where the old mark's end is slow."""
    release = rig.host.keys.release

    async def late(key: str) -> bool:
        while (await rig.marks())["d1"].detail != UNFIT:
            await asyncio.sleep(0.002)
        return await release(key)

    monkeypatch.setattr(rig.host.keys, "release", late)
    await rig.add("d1", 7)
    await rig.run()
    rig.links.broke("d1", RESET)
    await rig.marked("d1")
    rig.engine.unfit = {"d1"}
    await rig.leave("d1")
    await rig.add("d1", 7)
    await eventually(lambda: rig.links.known and rig.mark("d1") == UNFIT)
    await eventually(lambda: [t.get_name() for t in asyncio.all_tasks()].count("link d1") == 1)
    assert (await rig.marks())["d1"].detail == UNFIT


async def test_an_outage_of_the_store_delays_the_mark_in_it_only(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    await rig.add("d1")
    left, put = [3], rig.store.put
    await rig.run()

    async def refuses(*args: Any, **options: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise StoreUnavailable("away")
        await put(*args, **options)

    monkeypatch.setattr(rig.store, "put", refuses)
    rig.links.broke("d1", RESET)
    assert rig.mark("d1") == RESET
    await rig.marked("d1")
    assert left == [0]


async def test_a_store_that_is_back_tells_who_left(rig: Rig):
    await rig.add("d1")
    await rig.add("d2", 8)
    await rig.run()
    for engine_id in ("d1", "d2"):
        rig.links.broke(engine_id, RESET)
    await rig.marked("d1", "d2")
    rig.store.set_available(False)
    rig.store._remove(names.nixl_metadata_key("t", "d2"))
    rig.store.set_available(True)
    await rig.marked("d1")
    assert rig.mark("d1") == RESET and "d2" not in rig.links.known
    rig.store.wipe()
    await eventually(lambda: not rig.links.known)
    await rig.add("d1")  # by its engine, which has lost its key
    await eventually(lambda: "d1" in rig.links.known)
    assert rig.mark("d1") == ""


async def test_it_is_hopeless_while_no_engine_can_be_given_kv_and_says_where_it_fits_none(rig: Rig):
    links, said = rig.made(SHORT), list[str]()
    assert not links.hopeless, "there is none: nothing will be asked for"

    async def unfit(why: str, *more: str) -> None:
        said.extend(more)
        await eventually(lambda: links.misfit == why and rig.printed == said)

    rig.engine.unfit = {"d1", "d3"}
    await rig.add("d1")
    await rig.run(links)
    assert links.hopeless
    for_every = f"unfit for every decode worker, so it gets no jobs: {UNFIT}"
    await unfit(UNFIT, for_every)
    await rig.add("d3", 8)
    await rig.add("d2", 9)
    await unfit("", "fits a decode worker")
    assert not links.hopeless
    links.broke("d2", RESET)
    assert links.hopeless
    await unfit("")
    await eventually(lambda: not rig.mark("d2", links))
    assert not links.hopeless
    await rig.leave("d2")
    await unfit(UNFIT, for_every)
    await rig.leave("d1")
    await rig.leave("d3")
    await unfit("")
