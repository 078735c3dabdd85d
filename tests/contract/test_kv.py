"""Workers tell what they hold, routers follow: on every messaging, with losses and restarts."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Self, cast

import pytest
from prometheus_client import CollectorRegistry

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.kv import (
    KvChange,
    KvCleared,
    KvNotice,
    KvRemoved,
    KvStored,
    Load,
    decode_kv_notice,
)
from dynamo_lite.routing import kv_publisher as publisher
from dynamo_lite.routing.kv_chain import chain_hashes
from dynamo_lite.routing.kv_follower import LOAD_AGE_S, KvFollower
from dynamo_lite.routing.kv_publisher import KvPublisher
from dynamo_lite.routing.kv_routing import KvPicker, KvRoutingOptions
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.messaging import Messaging
from tests.builders import endpoint_record, eventually, generate_request, register
from tests.twins.servers import MemoryMessaging, MemoryStore
from tests.unit.virtual import virtual

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

BLOCK = 4
COMPONENT = "Worker"
#: Prompts of three blocks; many begin alike.
PROMPTS = [[a] * 4 + [b] * 4 + [c] * 4 for a in range(3) for b in range(3) for c in range(3)]


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    async with MemoryStore() as store:
        yield store


class Lossy:
    """A messaging whose notices get lost while `losing` is set."""

    def __init__(self, messaging: Messaging):
        self._messaging = messaging
        self.losing = False
        self.lost = 0
        self.times: list[float] = []

    def __getattr__(self, name: str):
        return getattr(self._messaging, name)

    async def publish(self, subject: str, payload: bytes) -> None:
        self.times.append(asyncio.get_running_loop().time())
        if self.losing:
            self.lost += 1
        else:
            await self._messaging.publish(subject, payload)


class Worker:
    """A publisher with an engine's blocks behind it."""

    block_size_tokens = BLOCK

    def __init__(self, messaging: Messaging, store: MemoryStore, namespace: str, lease_id: int):
        self.messaging = Lossy(messaging)
        carrier = cast("Messaging", self.messaging)
        self.lease_id, self.load = lease_id, Load()
        self._store, self._namespace = store, namespace
        self._held: list[bytes] = []
        self._stack = AsyncExitStack()
        self.publisher = KvPublisher(
            carrier,
            namespace=namespace,
            component=COMPONENT,
            lease_id=lease_id,
            load=lambda: self.load,
            holdings=self,
        )

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.publisher.serve())
        task = asyncio.create_task(self.publisher.run())
        self._stack.push_async_callback(end, task)
        record = endpoint_record(self.lease_id, COMPONENT, namespace=self._namespace, model="m")
        self._key = await register(self._store, record)
        self._stack.push_async_callback(self.leave)
        return self

    async def leave(self) -> None:
        """Its key goes; it still answers."""
        await self._store.delete(self._key)

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def held(self) -> list[int]:
        return [_hash(name) for name in self._held]

    def compute(self, prompt: list[int]) -> None:
        """Stores what of the prompt it does not hold yet."""
        prefixes = [bytes(prompt[: BLOCK * (i + 1)]) for i in range(len(prompt) // BLOCK)]
        first = 0
        while first < len(prefixes) and prefixes[first] in self._held:
            first += 1
        new = prefixes[first:]
        self._held += new
        if new:
            self.publisher.changed([KvStored(hashes=[_hash(name) for name in new])])

    def evict(self, rng: random.Random) -> None:
        if self._held:
            # As vLLM: the end of a prompt goes first.
            ends = [a for a in self._held if not any(b.startswith(a) for b in self._held if b != a)]
            self._held.remove(name := rng.choice(ends))
            self.publisher.changed([KvRemoved(hashes=[_hash(name)])])

    def clear(self) -> None:
        self._held.clear()
        self.publisher.changed([KvCleared()])

    def longest(self, prompt: list[int]) -> int:
        count = 0
        while count < 3 and bytes(prompt[: BLOCK * (count + 1)]) in self._held:
            count += 1
        return count


def _hash(name: bytes) -> int:
    return chain_hashes(list(name), BLOCK)[-1]


async def end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Router:
    """A follower of a namespace's workers."""

    def __init__(self, messaging: Messaging, store: MemoryStore, namespace: str):
        self.registry = CollectorRegistry()
        self.drops: list[str] = []
        self.roster = Roster(store, names.endpoint_prefix(namespace, COMPONENT, "generate"))
        self.follower = KvFollower(
            messaging,
            self.roster,
            namespace=namespace,
            component=COMPONENT,
            max_blocks=10_000,
            registry=self.registry,
            on_drop=self.drops.append,
        )
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.roster)
        await self._stack.enter_async_context(self.follower)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def count(self, result: str) -> float:
        found = self.registry.get_sample_value("dynamo_lite_kv_notices_total", {"result": result})
        return found or 0.0

    def sees(self, worker: Worker) -> bool:
        """Whether it knows of the worker's blocks what is true, for every prompt."""
        index = self.follower.index(worker.lease_id)
        if index is None:
            return False
        return all(
            index.match(chain_hashes(prompt, BLOCK)).get(worker.lease_id, 0)
            == worker.longest(prompt)
            for prompt in PROMPTS
        )


async def test_all_blocks_come_in_parts_while_they_change(
    messaging: Messaging, store: MemoryStore, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "HASHES_PER_MESSAGE", 3)
    rng = random.Random(2)
    async with Worker(messaging, store, namespace, 7) as worker:
        for prompt in PROMPTS:
            worker.compute(prompt)
        await eventually(lambda: not repr(worker.publisher).endswith("number=0>"))
        async with Router(messaging, store, namespace) as router:
            await eventually(lambda: router.count("gap") > 0)
            for _ in range(50):
                worker.evict(rng)
                worker.compute(rng.choice(PROMPTS))
                await asyncio.sleep(0.001)
            await eventually(lambda: router.sees(worker))


async def test_routers_that_ask_together_are_answered_once(
    messaging: Messaging, store: MemoryStore, namespace: str
) -> None:
    wholes: list[int] = []

    async def hear(payload: bytes) -> None:
        notice = decode_kv_notice(payload)
        if notice.changes and isinstance(notice.changes[0], KvCleared):
            wholes.append(notice.number)

    asked = names.kv_snapshot_subject(namespace, COMPONENT, 7)
    async with (
        messaging.serve(names.kv_subject(namespace, COMPONENT), hear),
        Worker(messaging, store, namespace, 7) as worker,
    ):
        worker.compute(PROMPTS[0])
        for _ in range(3):
            await messaging.publish(asked, b"")
            await asyncio.sleep(0.2)
        await eventually(lambda: len(wholes) == 2)
        await asyncio.sleep(0.3)
        assert len(wholes) == 2, "one at once, and one for all that came meanwhile"


async def test_bad_notices_are_dropped_and_counted(
    messaging: Messaging, store: MemoryStore, namespace: str
) -> None:
    subject = names.kv_subject(namespace, COMPONENT)
    chain = chain_hashes(PROMPTS[3], BLOCK)

    def forged(lease_id: int, number: int) -> bytes:
        changes: list[KvChange] = [KvStored(hashes=chain)]
        return encode(KvNotice(lease_id=lease_id, number=number, load=Load(), changes=changes))

    async with (
        Router(messaging, store, namespace) as router,
        Worker(messaging, store, namespace, 7) as worker,
    ):
        worker.compute(PROMPTS[0])
        await eventually(lambda: router.sees(worker) and router.count("applied") >= 1)
        await messaging.publish(subject, forged(99, 1))
        await eventually(lambda: router.count("unknown") == 1)
        for garbage in (b"", b"\xc1", encode(Load()), forged(7, 1)[:-3]):
            await messaging.publish(subject, garbage)
        await eventually(lambda: router.drops == ["kv_notice"] * 4)
        assert router.sees(worker)
        # From the future: what is true is asked for.
        await messaging.publish(subject, forged(7, 1 << 40))
        await eventually(lambda: router.count("gap") >= 1)
        await eventually(lambda: router.sees(worker))
        worker.compute(PROMPTS[9])
        await eventually(lambda: router.sees(worker))


async def test_loads_are_published_when_they_change_and_not_more_often_than_that(
    messaging: Messaging, store: MemoryStore, namespace: str
) -> None:
    told: list[Load | None] = []

    async def listen(payload: bytes) -> None:
        told.append(decode_kv_notice(payload).load)

    async with messaging.serve(names.kv_subject(namespace, COMPONENT), listen):
        async with Worker(messaging, store, namespace, 7) as worker:
            for running in range(1, 101):
                worker.load = Load(running=running)
                await asyncio.sleep(0.004)
            await eventually(lambda: bool(told) and told[-1] == Load(running=100))
        times = worker.messaging.times
        assert len(told) <= len(times) <= 2 + (times[-1] - times[0]) / publisher.LOAD_PERIOD_S


async def test_random_losses_and_restarts(
    messaging: Messaging, store: MemoryStore, namespace: str
) -> None:
    """Whatever was lost, in the end the router knows what is true."""
    rng = random.Random(3)
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(Worker(messaging, store, namespace, lease_id))
            for lease_id in (1, 2, 3)
        ]
        for _ in range(3):  # routers, one after the other
            async with Router(messaging, store, namespace) as router:
                for _ in range(60):
                    worker = rng.choice(workers)
                    worker.messaging.losing = rng.random() < 0.2
                    worker.compute(rng.choice(PROMPTS))
                    for _ in range(rng.randrange(4)):
                        worker.evict(rng)
                    if rng.random() < 0.05:
                        worker.clear()
                    await asyncio.sleep(rng.choice([0, 0.001, 0.003]))
                for worker in workers:
                    worker.messaging.losing = False
                await eventually(lambda r=router: all(r.sees(worker) for worker in workers))


@virtual
async def test_a_load_that_becomes_too_old_moves_its_worker() -> None:
    """Without any event: nothing more comes of the worker."""
    async with (
        MemoryMessaging() as messaging,
        MemoryStore() as store,
        Router(messaging, store, "t") as router,
        Worker(messaging, store, "t", 1) as silent,
        Worker(messaging, store, "t", 2),
    ):
        silent.load = Load(prefill_tokens=5000)
        picker = KvPicker(router.follower, KvRoutingOptions())
        router.follower.on_load(picker.loads.reported)
        await asyncio.sleep(1.5)
        members = router.roster.members

        def pick() -> int:
            picked = picker.pick(members, generate_request("r", prompt_token_ids=[9]))
            picker.released("r")
            return picked.member.lease_id

        assert [pick() for _ in range(3)] == [2, 2, 2]
        silent.messaging.losing = True
        await asyncio.sleep(LOAD_AGE_S - 1.0)
        assert pick() == 2
        await asyncio.sleep(1.5)
        assert [pick() for _ in range(3)] == [1, 2, 1]
