"""The router as a process of its own, and the Frontend's side of it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import Any, Self

import pytest

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode, encode_json
from dynamo_lite.protocol.errors import NoWorkers
from dynamo_lite.protocol.live_options import LiveOptionsRecord, Values
from dynamo_lite.protocol.routing import PickRequest, RequestOutcomes, decode_pick_request
from dynamo_lite.routing import remote_router
from dynamo_lite.routing.remote_router import RemoteRouter
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.runtime.overview.fetch import fetch_health
from dynamo_lite.runtime.process.host import ProcessEnvironment, run_process
from dynamo_lite.runtime.tasks import running
from dynamo_lite.serve.services.router import Router
from tests.builders import (
    endpoint_record,
    eventually,
    fake_host,
    generate_request,
    loop_time,
    members_when,
    process_spec,
    register,
)
from tests.contract.test_kv import COMPONENT, PROMPTS, Worker
from tests.servers import PrivateServer
from tests.twins.servers import MemoryStore

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

FRONTEND = 0xF


class Cluster:
    """Two workers, a Frontend's key, and its side of routing; routers are started in it."""

    def __init__(self, messaging: Messaging, namespace: str):
        self.messaging, self.namespace = messaging, namespace
        self.store = MemoryStore()
        self.routers = Roster(self.store, names.endpoint_prefix(namespace, "Router", "pick"))
        self.roster = Roster(self.store, names.endpoint_prefix(namespace, COMPONENT, "generate"))
        self.workers = [Worker(messaging, self.store, namespace, n) for n in (1, 2)]
        host = fake_host(messaging, namespace, FRONTEND)
        self.registry = host.registry
        self.remote = RemoteRouter(host, self.routers)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        outcomes = running(self.remote.publish_outcomes(), name="outcomes")
        parts = (self.store, *self.workers, self.routers, self.roster, outcomes)
        for part in parts:
            await self._stack.enter_async_context(part)
        frontend = endpoint_record(FRONTEND, "Frontend", "http", namespace=self.namespace)
        self.frontend_key = await register(self.store, frontend)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @contextlib.asynccontextmanager
    async def router(self, beside: int = 0) -> AsyncIterator[Router]:
        """A process of it, and that it is known to be there, and to know the workers.

        beside: how many others are registered, under lower lease ids.
        """
        spec = process_spec(
            "Router",
            namespace=self.namespace,
            nats_url="nats://x",
            etcd_url="http://x",
            state_dir="/nowhere",
            watch_component=COMPONENT,
        )
        router = Router({"kv_router": {"kv_weight": 100.0}})
        around = ProcessEnvironment(
            open_store=lambda _: contextlib.nullcontext(self.store),
            open_messaging=lambda *_: contextlib.nullcontext(self.messaging),
        )
        reports: list[dict[str, Any]] = []
        task = asyncio.create_task(run_process(spec, router, reports.append, around))
        try:
            await eventually(lambda: any(r["state"] == "ready" for r in reports), 15)
            await members_when(self.routers, lambda members: len(members) == 1 + beside, 5)
            follower: Any = router._picker.loads._view
            known, members = follower._workers, self.roster.members
            await eventually(
                lambda: all(m.lease_id in known and known[m.lease_id].complete for m in members), 15
            )
            yield router
        finally:
            await self.store.revoke(self.routers.members[-1].lease_id)
            assert await task == 0
            await members_when(self.routers, lambda members: len(members) == beside, 5)

    async def choose(self, prompt: list[int], request_id: str, **fields: Any) -> int:
        request = generate_request(request_id, prompt_token_ids=[*prompt, 1], **fields)
        picked = await self.remote.pick(self.roster.members, request)
        return picked.member.lease_id

    @property
    def fallbacks(self) -> float:
        return self.registry.get_sample_value("dynamo_lite_router_fallbacks_total") or 0.0


@pytest.fixture
async def cluster(
    messaging: Messaging, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Cluster]:
    monkeypatch.setattr(remote_router, "ANSWER_S", 10.0)
    async with Cluster(messaging, namespace) as cluster:
        yield cluster


async def test_it_chooses_by_prefix_and_by_what_it_has_placed(cluster: Cluster) -> None:
    for worker, prompt in zip(cluster.workers, (PROMPTS[3], PROMPTS[20]), strict=True):
        worker.compute(prompt)
    async with cluster.router() as router:
        for number in range(4):
            await until_prefix(cluster, PROMPTS[20], 2)
            assert await cluster.choose(PROMPTS[3], f"a{number}") == 1
        together = [await cluster.choose([9] * 12, f"b{number}") for number in range(2)]
        assert len(set(together)) == 1, "the second one follows the first one's prefix"
        # The releases of `until_prefix` are messages of their own, which may come later.
        await eventually(lambda: router.health()["requests"] == 6)
        cluster.remote.answered("a0")
        for name in ("a0", "a1", "a2", "a3", "b0", "b1"):
            cluster.remote.released(name)
        await eventually(lambda: router.health()["requests"] == 0)
    assert cluster.fallbacks == 0


async def until_prefix(cluster: Cluster, prompt: list[int], lease_id: int) -> None:
    """Until the router's index has what the workers hold."""

    async def chosen() -> bool:
        found = await cluster.choose(prompt, "probe")
        cluster.remote.released("probe")
        return found == lease_id

    await eventually(chosen, 5)


async def test_prompts_with_media_go_by_load(cluster: Cluster) -> None:
    cluster.workers[0].compute(PROMPTS[3])
    async with cluster.router():
        await until_prefix(cluster, PROMPTS[3], 1)
        picked = {await cluster.choose(PROMPTS[3], f"i{n}", inputs=b"x") for n in range(2)}
        assert picked == {1, 2}


async def test_without_a_router_the_frontend_chooses(cluster: Cluster) -> None:
    assert {await cluster.choose([5], "a"), await cluster.choose([5], "b")} == {1, 2}
    assert cluster.fallbacks == 2
    async with cluster.router() as router:
        await cluster.choose([5], "c")
        assert (cluster.fallbacks, router.health()["requests"]) == (2, 1)
    await cluster.choose([5], "d")
    assert cluster.fallbacks == 3


async def test_no_worker_to_choose_from_is_an_error(cluster: Cluster) -> None:
    for worker in cluster.workers:
        await worker.leave()
    await members_when(cluster.roster, lambda members: not members, 5)
    with pytest.raises(NoWorkers):
        await cluster.choose([5], "a")


async def test_a_router_that_does_not_answer_is_left_alone_for_a_while(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_router, "ALONE_S", 3600.0)
    record = endpoint_record(0x1, "Router", "pick", namespace=cluster.namespace)
    asked: list[PickRequest] = []

    async def garble(payload: bytes) -> bytes:
        asked.append(decode_pick_request(payload))
        return b"\xc1"

    async with cluster.messaging.serve(record.transport.nats_tcp, garble):
        await register(cluster.store, record)
        await members_when(cluster.routers, lambda members: len(members) == 1, 5)
        for number in range(3):
            assert await cluster.choose([5], f"r{number}") in (1, 2)
        assert (len(asked), cluster.fallbacks) == (1, 3)
        async with cluster.router(beside=1) as router:
            for number in range(3):
                await cluster.choose([5], f"s{number}")
            assert cluster.fallbacks == 3 and router.health()["requests"] == 3
        assert len(asked) == 1


@pytest.mark.parametrize("fault", ["killed", "frozen"])
async def test_without_the_broker_only_the_first_requests_wait_for_a_router(
    nats_server: PrivateServer, namespace: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_router, "ALONE_S", 2.0)
    monkeypatch.setattr(remote_router, "ANSWER_S", 3.0)
    async with (
        NatsMessaging(nats_server.url) as messaging,
        Cluster(messaging, namespace) as cluster,
        cluster.router() as router,
    ):
        await cluster.choose([5], "before")
        if fault == "killed":
            await nats_server.kill()
        else:
            nats_server.freeze()
        number = 0
        while not cluster.fallbacks:  # a signal may take effect a little later
            number += 1
            began = loop_time()
            await cluster.choose([5], f"a{number}")
        for tell in (cluster.remote.answered, cluster.remote.released):
            tell("before")
        # Not yet noticed as disconnected when it is frozen: one request waits for its timeout.
        assert loop_time() - began < 3.0 + 1.5
        began = loop_time()
        for name in ("b", "c", "d"):
            await cluster.choose([5], name)
        assert loop_time() - began < 1.5
        assert cluster.fallbacks == 4
        if fault == "killed":
            await nats_server.restart()
        else:
            nats_server.thaw()
        await eventually(lambda: messaging.connected, 10)
        await eventually(lambda: router.health()["requests"] == 0)  # it hears of the end

        async def placed_again() -> bool:
            await cluster.choose([5], "after")
            return router.health()["requests"] == 1

        await eventually(placed_again, 5)


async def test_a_gone_frontends_requests_are_forgotten(cluster: Cluster) -> None:
    async with cluster.router() as router:
        await cluster.choose([5], "a")
        await cluster.store.delete(cluster.frontend_key)
        await eventually(lambda: router.health()["requests"] == 0)


async def test_a_release_that_overtakes_its_question_counts(cluster: Cluster) -> None:
    async with cluster.router() as router:
        lease_id = cluster.routers.members[0].lease_id
        fates = names.fates_subject(cluster.namespace, lease_id)
        early = RequestOutcomes(client=FRONTEND, released=["x"])
        await cluster.messaging.publish(fates, encode(early))
        await cluster.messaging.publish(fates, b"\xc1")  # and nothing that is malformed
        question = PickRequest(
            client=FRONTEND, request_id="x", prompt_token_ids=[1], candidates=[1, 2]
        )
        await eventually(lambda: "x" in repr(router._early))
        subject = cluster.routers.members[0].transport.nats_tcp
        await cluster.messaging.request(subject, encode(question), timeout_s=5)
        assert router.health()["requests"] == 0


async def test_what_it_weighs_changes_while_it_runs(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.workers[0].compute(PROMPTS[3])
    async with cluster.router() as router:
        await until_prefix(cluster, PROMPTS[3], 1)

        async def chosen() -> set[int]:
            found: set[int] = set()
            for number in range(4):
                found.add(await cluster.choose(PROMPTS[3], f"r{number}"))
                cluster.remote.released(f"r{number}")
                await eventually(lambda: router.health()["requests"] == 0)
            return found

        assert await chosen() == {1}
        key = names.live_options_key(cluster.namespace, "Router")
        weight = {"kv-router.kv-weight": 0.0}

        async def options() -> Mapping[str, Any]:
            return (await fetch_health(cluster.routers.members[0].status_url))["options"]

        async def is_set(values: Values) -> None:
            async def there() -> bool:
                return (await options())["set"] == values

            await eventually(there)

        record = LiveOptionsRecord(values=weight)
        await cluster.store.put(key, encode_json(record))
        await is_set(weight)
        assert await chosen() == {1, 2}, "prefixes count for nothing, so they take turns"
        await cluster.store.put(key, b'{"values":{"kv-router.kv-weight":-1},"version":5}')
        await eventually(lambda: "options refused" in caplog.text)
        await is_set(weight)
        assert (await options())["file"]["kv-router.kv-weight"] == 100
        await cluster.store.delete(key)
        await is_set({})
        assert await chosen() == {1}
