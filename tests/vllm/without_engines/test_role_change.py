"""When a running engine may leave its role, and how it is told to."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from dynamo_lite.disagg.engine_config import (
    DecodeEngineConfig,
    EngineConfig,
    PrefillEngineConfig,
    write_engine_config,
)
from dynamo_lite.disagg.messages import NewRole, RankResults
from dynamo_lite.disagg.role_orders import RoleOrders
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode_sealed
from dynamo_lite.protocol.errors import DeadlineExceeded, ProtocolError
from dynamo_lite.protocol.options import DisaggOptions
from dynamo_lite.protocol.prefill import (
    ChangeRole,
    LinkTest,
    Listen,
    decode_change_role,
    decode_role_reply,
)
from dynamo_lite.queue.base import QueueConfig
from dynamo_lite.simulation.servers.memory import MemoryMessaging
from dynamo_lite.vllm.engine.engine_config import ShortFirstAndArrivals, choose_scheduler
from dynamo_lite.vllm.engine.role_change import RoleChange
from dynamo_lite.vllm.engine.short_first import AsyncShortFirst, ShortFirst
from tests.builders import NAMESPACE, ManualClock, engine_metadata
from tests.unit.decode_engine import Decode, FakePool, prompt
from tests.unit.test_prefix_reads import Half

DECODE = DecodeEngineConfig(
    options=DisaggOptions(), prefill_component="PrefillWorker", queue=QueueConfig()
)
PREFILL = PrefillEngineConfig(
    fence_path="", min_prefix_read_length=128, queue=QueueConfig(order="short-first")
)
PRESENT = EngineConfig(
    namespace=NAMESPACE,
    engine_id="11111111-1111-4111-8111-111111111111",
    lease_id=1,
    lease_ttl_s=5.0,
    nats_url="",
    etcd_url="",
    role=DECODE,
    switchable=True,
)
NEXT = msgspec.structs.replace(
    PRESENT, engine_id="22222222-2222-4222-8222-222222222222", lease_id=2, role=PREFILL
)
FILE = "PrefillWorker-1.engine.json"


# What is open in a role


@pytest.fixture
def decode() -> Decode:
    return Decode(ManualClock())


def test_an_engine_without_requests_may_leave(decode: Decode):
    assert decode.half.unfinished == ""
    assert Half().half.unfinished == ""


async def test_a_decode_engine_stays_until_no_writer_may_write(decode: Decode):
    attempt = await decode.ask(claimed=True)
    assert decode.half.unfinished == "1 remote prefills are not over, 0 quarantined"
    decode.finish("r1")
    decode.half.build_step()
    assert decode.half.unfinished == "0 remote prefills are not over, 1 quarantined"
    await decode.done(attempt, "abandoned")
    assert decode.half.unfinished == "instructions wait for a step"
    decode.half.build_step()
    assert decode.half.unfinished == ""
    decode.assert_clean()
    await decode.network()


async def test_a_decode_engine_stays_while_it_computes(decode: Decode):
    assert decode.admit(prompt("short", 2)) == 0
    decode.half.build_step()
    assert decode.half.unfinished == "it has requests, or blocks are held back"
    decode.finish("short")
    assert decode.half.unfinished == ""


async def test_a_decode_engine_stays_while_its_link_is_tested(decode: Decode):
    await decode.net._on_poll(encode_sealed(Listen(writer_lease_id=5, for_s=2.0)))
    assert decode.half.unfinished == "a link to it is being tested"
    await decode.net._on_poll(encode_sealed(Listen(writer_lease_id=5, for_s=0)))
    assert decode.half.unfinished == ""


def test_a_prefill_engine_stays_until_its_transfers_are_over():
    half, jobs = Half(), "1 jobs are not over, or their transfers"
    job = half.job(prefix=0)
    half.half.num_new_matched_tokens(job, 0)
    assert half.half.unfinished == jobs
    half.admit(job)
    half.step(a1=26)
    assert half.half.request_finished(job)
    assert half.half.unfinished == jobs
    half.step()
    half.half.worker_output(RankResults(sent={"a1"}), None)
    assert half.half.unfinished == ""


def test_a_prefill_engine_stays_until_a_stopped_read_is_over():
    half = Half()
    job = half.job()
    assert half.admit(job)
    half.step()
    half.half.request_finished(job)
    assert half.half.unfinished.startswith("1 jobs")
    half.half.worker_output(RankResults(lost={"a1"}), None)
    assert half.half.unfinished == ""


async def test_a_prefill_engine_stays_while_it_tests_a_link():
    half = Half()
    test = encode_sealed(LinkTest(order="1.1", target=engine_metadata()))
    async with half.session():
        await half.messaging.request(names.preflight_subject("t", "p1"), test, timeout_s=5)
    assert half.half.unfinished == "it tests a link"


# The order


class Scene:
    """An engine at the boundary of two steps."""

    def __init__(self, folder: Path):
        self.messaging = MemoryMessaging()
        clients: Any = SimpleNamespace(messaging=lambda: nullcontext(self.messaging))
        self.orders, self.pool, self.closed = RoleOrders(), FakePool(), False
        # vLLM's own block.
        self.pool.touch(self.pool.blocks[:1])
        self.half: Any = SimpleNamespace(unfinished="", bridge=self)
        self.session = self.orders.session(PRESENT, clients, nullcontext, lambda _: None)
        self.change = RoleChange(self.orders, folder / "VllmWorker-0.engine.json")

    def close(self) -> None:
        self.closed = True

    async def order(self, **changes: str) -> str:
        """The component's order arrives; returns the answer."""
        fields = {"engine_id": NEXT.engine_id, "config_file": FILE, **changes}
        order = encode_sealed(ChangeRole(**fields))
        subject = names.role_subject(NAMESPACE, PRESENT.engine_id)
        async with self.session():
            reply = await self.messaging.request(subject, order, timeout_s=5)
        return decode_role_reply(reply).refused

    def step(self) -> tuple[EngineConfig, NewRole] | None:
        return self.change.begin(self.half, self.pool, PRESENT)  # type: ignore[arg-type]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    write_engine_config(tmp_path / FILE, NEXT)
    return Scene(tmp_path)


async def test_the_session_ends_before_the_ranks_are_told(scene: Scene, tmp_path: Path):
    assert scene.step() is None
    assert await scene.order() == ""
    assert scene.orders.waiting and not scene.closed
    assert scene.step() == (NEXT, NewRole(str(tmp_path / FILE)))
    assert scene.closed and not scene.orders.waiting


@pytest.mark.parametrize("open_work", ["half", "blocks"])
async def test_a_refusal_is_answered_to_the_next_order(scene: Scene, open_work: str):
    used = scene.pool.blocks[5:7]
    if open_work == "half":
        scene.half.unfinished = why = "it tests a link"
    else:
        scene.pool.touch(used)
        why = "2 blocks of its KV are in use"
    assert await scene.order() == ""
    assert scene.step() is None
    assert not scene.closed and not scene.orders.waiting
    assert await scene.order() == why
    scene.half.unfinished = ""
    if open_work == "blocks":
        scene.pool.free_blocks(used)
    assert scene.step() is not None


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (msgspec.structs.replace(NEXT, engine_id=PRESENT.engine_id), "is not the config of engine"),
        (msgspec.structs.replace(NEXT, namespace="other"), "is not the config of engine"),
        (msgspec.structs.replace(NEXT, role=DECODE), "a new role needs another role"),
        (None, "cannot read its configuration"),
    ],
)
async def test_a_config_that_is_not_the_next_one_changes_nothing(
    scene: Scene, tmp_path: Path, written: EngineConfig | None, why: str
):
    (tmp_path / FILE).unlink()
    if written is not None:
        write_engine_config(tmp_path / FILE, written)
    await scene.order()
    assert scene.step() is None
    assert not scene.closed
    assert why in await scene.order()


@pytest.mark.parametrize("name", ["../x.engine.json", "/etc/x.engine.json", "x.json", ""])
def test_an_order_names_a_file_of_the_same_folder_only(name: str):
    order = ChangeRole(engine_id=NEXT.engine_id, config_file=name)
    with pytest.raises(ProtocolError):
        decode_change_role(encode_sealed(order))


async def test_orders_come_beside_the_session_of_the_half():
    messaging, dropped = MemoryMessaging(), list[str]()
    inside = asyncio.Event()

    @asynccontextmanager
    async def inner() -> AsyncIterator[None]:
        inside.set()
        yield

    @asynccontextmanager
    async def client() -> AsyncIterator[MemoryMessaging]:
        yield messaging

    orders = RoleOrders()
    servers: Any = SimpleNamespace(messaging=client)
    session: Callable[[], Any] = orders.session(
        PRESENT, servers, inner, lambda what, count=1: dropped.append(what)
    )
    subject = names.role_subject(NAMESPACE, PRESENT.engine_id)
    async with session():
        assert inside.is_set()
        order = ChangeRole(engine_id=NEXT.engine_id, config_file=FILE)
        reply = await messaging.request(subject, encode_sealed(order), timeout_s=1.0)
        assert decode_role_reply(reply).refused == ""
        assert orders.take() == order
        with pytest.raises(DeadlineExceeded):
            await messaging.request(subject, b"garbage", timeout_s=0.05)
        assert dropped == ["change_role"] and not orders.waiting


# The scheduler


@pytest.mark.parametrize(
    ("overlaps", "batches", "expected"),
    [
        (False, 1, ShortFirstAndArrivals),
        (False, 2, ShortFirst),
        (True, 2, AsyncShortFirst),
    ],
)
@pytest.mark.parametrize("first", [PRESENT, NEXT])
def test_the_scheduler_of_an_engine_of_either_role(
    first: EngineConfig, overlaps: bool, batches: int, expected: type
):
    scheduler = SimpleNamespace(scheduler_cls=None, async_scheduling=overlaps)
    config: Any = SimpleNamespace(
        scheduler_config=scheduler,
        max_concurrent_batches=batches,
        parallel_config=SimpleNamespace(data_parallel_size=1),
        speculative_config=None,
    )
    choose_scheduler(config, first)
    assert scheduler.scheduler_cls == f"{expected.__module__}.{expected.__name__}"
    scheduler.scheduler_cls = "own.Scheduler"
    choose_scheduler(config, first)
    assert scheduler.scheduler_cls == "own.Scheduler"


@pytest.mark.parametrize("kind", [ShortFirst, ShortFirstAndArrivals, AsyncShortFirst])
def test_nothing_is_held_back_in_the_role_without_lanes(monkeypatch: Any, kind: type):
    steps = list[str]()

    def schedule(self: Any, throttle_prefills: bool = False) -> Any:
        steps.append("vllm")
        return SimpleNamespace()

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    monkeypatch.setattr(AsyncScheduler, "schedule", schedule, raising=False)
    # Without a batch: who looks for prompts to hold back fails.
    engine = object.__new__(kind)
    engine.connector = SimpleNamespace(short_length=None)
    engine.schedule()
    assert steps == ["vllm"]
