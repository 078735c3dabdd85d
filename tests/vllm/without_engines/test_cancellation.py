"""When the owner of a request is cancelled at any await, nothing is left behind, and the next
request works.

Each test cancels one owner of the request path at its first suspension, its second and so on,
until it ends by itself: as it begins to wait, and when what it waits for has just come.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence, Set
from typing import Any, Self, cast

import pytest

from dynamo_lite.disagg.queue.base import Job, PrefillQueue
from dynamo_lite.disagg.queue.jetstream import JetStreamQueue
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import Unavailable
from dynamo_lite.protocol.generate import GenerateRequest
from dynamo_lite.protocol.options import AdmissionOptions
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.protocol.routing import Chosen, decode_fates, decode_pick_request
from dynamo_lite.request_plane.base import OnDeltas, OnLost
from dynamo_lite.request_plane.client import RemoteGenerateClient
from dynamo_lite.request_plane.failover import FailoverClient
from dynamo_lite.request_plane.migrating_request import MigrationPlan
from dynamo_lite.request_plane.server import GenerateServer
from dynamo_lite.routing.pickers import Picker, Selection
from dynamo_lite.routing.remote_router import RemoteRouter
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.tasks import running
from tests.builders import (
    NAMESPACE,
    endpoint_record,
    eventually,
    fake_host,
    generate_request,
    register,
)
from tests.contract.generating import FakeEngine, Outputs, tokens
from tests.sim.pair import GREEDY, QUEUE, Pair
from tests.sim.pair import tokens as random_tokens
from tests.sim.servers import SimNats
from tests.simulation.engine.model import first_wrong
from tests.simulation.engine.mover import Wire
from tests.simulation.loop.loop import VirtualLoop
from tests.simulation.network.network import Network
from tests.twins.servers import MemoryMessaging, MemoryStore
from tests.unit.cancelling import Cancel, at_every_await, both_moments, cancel_everywhere
from tests.unit.virtual import virtual


def network() -> Network:
    """The network of the running loop; this process has the name "world" in it."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return Network(loop)


async def delivered() -> None:
    """Delivers all messages in flight."""
    await asyncio.sleep(0.1)


async def all_closed(network: Network) -> None:
    """No connection of this process is open."""
    await eventually(lambda: not network.ends_of(network.loop.world))


# The request plane: workers' servers and a client of them


class Worker:
    """A worker's generate endpoint; its engine is scripted. room: how many requests it takes."""

    def __init__(self, lease_id: int = 1, room: int = 1):
        self.lease_id = lease_id
        self.engine = FakeEngine()
        limits = AdmissionOptions(max_in_flight_requests=room, max_queued_tokens=10**6)
        self.server = GenerateServer(self.engine, limits=limits)

    async def __aenter__(self) -> Self:
        await self.server.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.__aexit__()

    @property
    def record(self) -> EndpointRecord:
        return endpoint_record(self.lease_id, stream=self.server.stream_address)

    async def idle(self) -> None:
        """No request is left, in the server or in the engine."""
        await delivered()
        await eventually(lambda: not (self.server.in_flight or self.server.waiting_tokens))
        await eventually(lambda: not self.engine.running)
        assert await self.server.wait_idle(5.0)

    def answer(self) -> list[Any]:
        """Every running request gets its last tokens. Returns the deltas."""
        deltas = [tokens(request_id, 1, 2, finish="stop") for request_id in self.engine.running]
        self.engine.running.clear()
        self.server.deliver(deltas)
        return deltas


class Endpoint:
    """One worker, and a client of it."""

    def __init__(self, room: int = 1):
        self.network, self.outputs = network(), Outputs()
        self.worker = Worker(room=room)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        async with self.worker as worker:
            self.client = RemoteGenerateClient(
                "front", self.outputs.on_deltas, self.outputs.on_lost
            )
            async with self.client:
                yield self
            await eventually(lambda: not worker.server._listener.sessions)
            await worker.idle()
        await all_closed(self.network)

    async def submit(self, request_id: str) -> None:
        await self.client.submit(self.worker.record, generate_request(request_id))

    async def works(self) -> None:
        """The one slot of the server is free, and a request gets its tokens."""
        await self.submit("next")
        answer = self.worker.answer()
        await eventually(lambda: self.outputs.batches[-1:] == [answer])


@at_every_await(at_least=2)
async def test_submit_of_a_generate_client(cancel: Cancel):
    async with Endpoint().open() as endpoint:
        engine = endpoint.worker.engine
        engine.gate = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, engine.gate.set)
        await cancel.owner(endpoint.submit("a"))
        if not cancel.place:
            await endpoint.client.abort(["a"])
        await endpoint.worker.idle()
        assert endpoint.outputs.deltas == [] and endpoint.outputs.lost == []
        await endpoint.works()


@at_every_await(at_least=1)
async def test_submit_while_another_one_connects(cancel: Cancel):
    """Both wait for the same connection: the other one gets it."""
    async with Endpoint(room=2).open() as endpoint:
        other = asyncio.create_task(endpoint.submit("b"))
        await asyncio.sleep(0)
        await cancel.owner(endpoint.submit("a"))
        await other
        if not cancel.place:
            await endpoint.client.abort(["a"])
        await eventually(lambda: set(endpoint.worker.engine.running) == {"b"})
        await endpoint.client.abort(["b"])
        await endpoint.worker.idle()
        await endpoint.works()


@at_every_await(at_least=1)
async def test_the_end_of_a_generate_client(cancel: Cancel):
    """With a request that runs, and one whose connection is being made."""
    net, outputs = network(), Outputs()
    async with Worker(1) as first, Worker(2) as second:
        client = RemoteGenerateClient("front", outputs.on_deltas, outputs.on_lost)
        await client.submit(first.record, generate_request("a"))
        connecting = asyncio.create_task(client.submit(second.record, generate_request("b")))
        await asyncio.sleep(0)
        await cancel.owner(client.__aexit__())
        with pytest.raises(Unavailable):
            await connecting
        for worker in (first, second):
            await worker.idle()
        assert outputs.deltas == [] and outputs.lost == []
        await all_closed(net)


@at_every_await(at_least=1)
async def test_a_worker_that_takes_a_request(cancel: Cancel):
    """Its client disconnects while the engine takes its time to accept the request."""
    async with Endpoint().open() as endpoint:
        server, engine, take = endpoint.worker.server, endpoint.worker.engine, FakeEngine.submit
        await endpoint.submit("a")
        await endpoint.client.abort(["a"])
        await endpoint.worker.idle()
        engine.gate = gate = asyncio.Event()
        session: Any = _LocalSession(gate)
        engine.submit = lambda request: cancel.step(take(engine, request))
        cancel.action = lambda: server.abandon(session)
        request = encode(generate_request("b"))
        server.submit(session, "b", request)
        asyncio.get_running_loop().call_later(0.1, gate.set)
        await gate.wait()
        await delivered()
        server.abandon(session)
        await endpoint.worker.idle()
        assert "b" in engine.aborted
        await endpoint.works()


class _LocalSession:
    def __init__(self, gate: asyncio.Event):
        self._gate = gate

    def deliver(self, deltas: list[Any]) -> list[str]:
        return []

    def reply(self, request_id: str, reply: object) -> None:
        self._gate.set()


@at_every_await(at_least=1)
async def test_the_end_of_a_generate_server(cancel: Cancel):
    """With a request that runs; the engine takes its time to abort it."""
    net, outputs, worker = network(), Outputs(), Worker()
    await worker.server.__aenter__()
    async with RemoteGenerateClient("front", outputs.on_deltas, outputs.on_lost) as client:
        await client.submit(worker.record, generate_request("a"))
        await cancel.owner(worker.server.__aexit__())
        await eventually(lambda: bool(outputs.lost))
        assert outputs.lost == [(["a"], outputs.lost[0][1])]
        await worker.idle()
        await all_closed(net)


class _StuckEngine(FakeEngine):
    async def abort(self, request_ids: Sequence[str]) -> None:
        await asyncio.Event().wait()


@virtual
async def test_the_end_of_a_generate_server_whose_engine_never_aborts():
    """Nothing is cancelled; the task that waits for the engine ends with the server."""
    net, outputs = network(), Outputs()
    async with GenerateServer(_StuckEngine()) as server:
        member = endpoint_record(stream=server.stream_address)
        async with RemoteGenerateClient("front", outputs.on_deltas, outputs.on_lost) as client:
            await client.submit(member, generate_request("a"))
    await all_closed(net)


# The failover client, with the client of a Router


class Routing:
    """The Router: it sends requests to the candidates in turn, and knows what it placed."""

    def __init__(self, messaging: Messaging):
        self._messaging, self._count = messaging, 0
        self.placed: set[str] = set()

    async def __aenter__(self) -> Self:
        self._stack = contextlib.AsyncExitStack()
        enter = self._stack.enter_async_context
        await enter(self._messaging.serve("pick-9", self._pick))
        await enter(self._messaging.serve(names.fates_subject(NAMESPACE, 9), self._outcomes))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _pick(self, payload: bytes) -> bytes:
        request = decode_pick_request(payload)
        self.placed.add(request.request_id)
        await asyncio.sleep(0.01)
        return encode(Chosen(lease_id=min(request.candidates), reason="test"))

    async def _outcomes(self, payload: bytes) -> None:
        self.placed.difference_update(decode_fates(payload).released)


class Front:
    """Two workers, the Router, and a failover client that asks it."""

    def __init__(self) -> None:
        self.network, self.messaging, self.store = network(), MemoryMessaging(), MemoryStore()
        self.routing = Routing(self.messaging)
        self.workers = [Worker(lease_id) for lease_id in (1, 2)]
        self.outputs, self.ended = Outputs(), list[tuple[str, Exception]]()
        #: Set by a test that interrupts migrations.
        self.interrupts: Cancel | None = None

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        await register(self.store, endpoint_record(9, "Router", "pick", subject="pick-9"))
        async with contextlib.AsyncExitStack() as stack:
            enter = stack.enter_async_context
            for worker in self.workers:
                await enter(worker)
            await enter(self.routing)
            routers = await enter(
                Roster(self.store, names.endpoint_prefix(NAMESPACE, "Router", "pick"))
            )
            self.router = RemoteRouter(fake_host(self.messaging, NAMESPACE, 8), routers)
            await enter(running(self.router.publish_outcomes(), name="outcomes"))
            interrupted = _InterruptedPicker(self.router, self)
            self.client = FailoverClient(
                lambda on_deltas, on_lost: _InterruptedTransport(self, on_deltas, on_lost),
                picker=interrupted,
                on_deltas=self.outputs.on_deltas,
                on_ended=lambda request_id, error: self.ended.append((request_id, error)),
            )
            self.client.set_members([worker.record for worker in self.workers])
            async with self.client:
                yield self
            await eventually(lambda: not self.routing.placed)
        assert self.messaging._served == {}
        await all_closed(self.network)

    async def submit(self, request_id: str, timeout_s: float | None = None) -> None:
        request = generate_request(request_id, timeout_s=timeout_s)
        await self.client.submit(request, movable=MigrationPlan())

    async def nothing_left(self) -> None:
        """No request is left, here, in the Router, in the workers or in their engines."""
        empty = "<FailoverClient requests=0 attempts=0 tasks=0>"
        await eventually(lambda: repr(self.client) == empty)
        for worker in self.workers:
            await worker.idle()
        await eventually(lambda: not self.routing.placed)

    async def works(self) -> None:
        """Both workers have room again."""
        ids = ["next 1", "next 2"]
        for request_id in ids:
            await self.submit(request_id)
        for worker in self.workers:
            assert len(worker.answer()) == 1
        await eventually(
            lambda: sorted(d.request_id for d in self.outputs.deltas if d.finish_reason) == ids
        )
        await self.nothing_left()


class _InterruptedTransport(RemoteGenerateClient):
    def __init__(self, front: Front, on_deltas: OnDeltas, on_lost: OnLost):
        super().__init__("front", on_deltas, on_lost)
        self._front = front

    async def submit(self, member: EndpointRecord, request: GenerateRequest) -> None:
        work = super().submit(member, request)
        interrupts = self._front.interrupts
        await (work if interrupts is None else interrupts.step(work))


class _InterruptedPicker(Picker):
    def __init__(self, router: RemoteRouter, front: Front):
        self._router, self._front = router, front

    async def pick(
        self,
        members: Sequence[EndpointRecord],
        request: GenerateRequest,
        without: Set[int] = frozenset(),
    ) -> Selection:
        work = self._router.pick(members, request, without)
        interrupts = self._front.interrupts
        return await (work if interrupts is None else interrupts.step(work))

    def answered(self, request_id: str) -> None:
        self._router.answered(request_id)

    def released(self, request_id: str) -> None:
        self._router.released(request_id)


@pytest.mark.parametrize("timeout_s", [None, 30.0])
@both_moments
def test_submit_of_a_failover_client(woken: bool, timeout_s: float | None):
    """The first worker is busy, the second one takes the request."""

    async def script(cancel: Cancel) -> None:
        async with Front().open() as front:
            await front.submit("other")
            await cancel.owner(front.submit("a", timeout_s))
            assert set(front.workers[0].engine.running) == {"other~1"}
            await front.client.abort(["other"] if cancel.place else ["other", "a"])
            await front.nothing_left()
            assert front.outputs.deltas == [] and front.ended == []
            await front.works()

    cancel_everywhere(script, at_least=5, woken=woken)


@at_every_await(at_least=3)
async def test_an_abort_at_any_moment_of_a_migration(cancel: Cancel):
    async with Front().open() as front:
        await front.submit("a")

        def abort() -> None:
            aborting = front.client.abort(["a"])
            with pytest.raises(StopIteration):  # it does not wait for anything
                aborting.send(None)

        cancel.action, front.interrupts = abort, cancel
        lost, left = front.workers
        lost.server.disconnect_all("test")
        await eventually(lambda: cancel.place or left.engine.running)
        front.interrupts = None
        if not cancel.place:
            await front.client.abort(["a"])
        await front.nothing_left()
        assert front.outputs.deltas == [] and front.ended == []
        await front.submit("next")
        assert len(left.answer()) == 1
        await eventually(lambda: bool(front.outputs.deltas))


# A remote prefill: the job's owner, in a prefill worker


class RemotePrefill(Pair):
    """A decode and a prefill engine with simulated KV; nothing runs jobs but the test."""

    runners = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls) -> AsyncIterator["RemotePrefill"]:
        async with contextlib.AsyncExitStack() as stack:
            pair = cls(stack, Wire(fastest_s=0.01, slowest_s=0.05), num_blocks=160)
            await pair.start()
            yield pair

    async def answered(self, request_id: str, prompt: list[int]) -> None:
        await self.until(lambda: request_id in self.ended)
        assert first_wrong(prompt, GREEDY, self.got[request_id]) is None

    async def takes_over(self, prompt: list[int]) -> None:
        """Another job loop of the worker ends what was left, and serves the next request."""
        async with running(self.jobs.run(), name="jobs"):
            await self.until(lambda: "a" in self.ended)
            await self.until(lambda: self.jobs.idle.is_set())
            await asyncio.sleep(1.0)  # the decode engine sees that the worker is there
            before = self.counts.get("remote/committed", 0)
            await self.submit("next", prompt, GREEDY)
            await self.answered("next", prompt)
            assert self.counts["remote/committed"] > before
            await self.nothing_left()

    async def nothing_left(self) -> None:
        """No attempt, claim or job; every block of both engines is free."""
        await self.until(lambda: not self.jobs.working)
        assert self.jobs.idle.is_set()
        for cell in [self.cells.open(claim) for claim in range(1, self.runners + 2)]:
            cell.free()
        queue = self.servers.queue(QUEUE)
        async with queue:
            async with asyncio.timeout(30):
                while (await queue.depth()).jobs:
                    await asyncio.sleep(0.05)
        decode, prefill = (self.engines[name] for name in ("decode", "prefill"))
        await self.until(lambda: cast("Any", decode.halves).unsettled() is None)
        await self.until(lambda: not (decode.scheduler.has_work or prefill.pool.taken()))
        await self.idle()


@at_every_await(at_least=4)
async def test_the_job_loop_of_a_prefill_worker(cancel: Cancel):
    """Another loop of the worker takes the job over, or the engine computes the prompt."""
    first, second = random_tokens(1, 60), random_tokens(2, 60)
    async with RemotePrefill.open() as pair:
        await pair.submit("a", first, GREEDY)
        await cancel.owner(pair.jobs.run(), until=pair.answered("a", first))
        await pair.takes_over(second)
        assert first_wrong(first, GREEDY, pair.got["a"]) is None


# The prefill queue


def open_queue() -> PrefillQueue:
    return JetStreamQueue(SimNats(network()).url, "s")


@both_moments
def test_a_pull_of_a_job(woken: bool):
    async def script(cancel: Cancel) -> None:
        async with open_queue() as queue:

            async def push() -> None:
                await asyncio.sleep(0.05)
                await queue.push(b"job", message_id="m")

            async with running(push(), name="push"):
                job = await cancel.owner(queue.pull(timeout_s=5.0))
                job = job or await queue.pull(timeout_s=5.0)
                assert job is not None and job.payload == b"job"
                await job.ack()
                assert (await queue.depth()).jobs == 0

    cancel_everywhere(script, at_least=3, woken=woken)


@both_moments
def test_a_push_and_an_answer_of_a_job(woken: bool):
    """Both are repeated, and the job is there once, then not at all."""

    async def script(cancel: Cancel) -> None:
        async with open_queue() as queue:
            pulled: list[Job] = []

            async def push_and_answer() -> None:
                await queue.push(b"job", message_id="m")
                job = await queue.pull(timeout_s=5.0)
                assert job is not None
                pulled.append(job)
                await job.ack()

            await cancel.owner(push_and_answer())
            await queue.push(b"job", message_id="m")
            if not pulled:
                job = await queue.pull(timeout_s=5.0)
                assert job is not None
                pulled.append(job)
            await pulled[0].ack()
            assert (await queue.depth()).jobs == 0

    cancel_everywhere(script, at_least=4, woken=woken)
