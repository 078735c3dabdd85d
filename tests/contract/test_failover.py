"""FailoverClient over real token streams: workers with null engines are killed under it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import partial

import msgspec
import pytest

from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.protocol.generate import (
    Cancel,
    GenerateRequest,
    Submit,
    TokenDelta,
    Welcome,
    decode_client_frame,
)
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.request_plane.client import RemoteGenerateClient
from dynamo_lite.request_plane.failover import FailoverClient
from dynamo_lite.request_plane.framing import FrameParser, frame, parse_address
from dynamo_lite.request_plane.migration import Continue, MigrationPlan, Replay
from dynamo_lite.request_plane.server import GenerateServer
from dynamo_lite.routing.pickers import RoundRobin
from tests.builders import endpoint_record, generate_request, loop_time
from tests.null_engine import NullEngine

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

ANSWER_TOKENS = 40
#: RemoteGenerateClient's, to a Welcome.
CONNECT_S = 2.0
REQUEST_S = 2.0
CONTINUE = Continue(reason="test")
REPLAY = Replay(reason="test")


def token_at(prompt: list[int], position: int) -> int:
    return prompt[0] * 1000 + position


def request_of(number: int, timeout_s: float | None = None) -> GenerateRequest:
    return generate_request(
        f"r{number}",
        prompt_token_ids=[number, 2, 3],
        sampling=msgspec.msgpack.encode({"max_tokens": ANSWER_TOKENS}),
        timeout_s=timeout_s,
    )


def answer_to(number: int) -> list[int]:
    return [token_at([number], position) for position in range(ANSWER_TOKENS)]


class Worker:
    """One engine and its server. It makes a step for each `release` of `steps`."""

    def __init__(self, lease_id: int, max_in_flight: int | None):
        self.engine = NullEngine(token_at=token_at)
        self.server = GenerateServer(self.engine, max_in_flight=max_in_flight)
        self.steps = asyncio.Semaphore(0)
        self._lease_id = lease_id
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        await self._stack.enter_async_context(self.engine)
        await self._stack.enter_async_context(self.server)
        stepping = asyncio.create_task(self._step(), name="steps")
        self._stack.callback(stepping.cancel)

    async def kill(self) -> None:
        await self._stack.aclose()

    @property
    def record(self) -> EndpointRecord:
        return endpoint_record(self._lease_id, stream=self.server.stream_address)

    async def _step(self) -> None:
        steps = self.engine.steps()
        while True:
            await self.steps.acquire()
            self.server.deliver(await anext(steps))


class Cluster:
    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.tokens: dict[str, list[int]] = {}
        self.ends: list[tuple[str, str]] = []
        self.prompts_told = 0
        #: Members that are no workers of ours; they come first.
        self.strangers: list[EndpointRecord] = []
        self._changed = asyncio.Event()

    async def open(
        self, stack: AsyncExitStack, workers: int, max_in_flight: int | None = None
    ) -> FailoverClient:
        for lease_id in range(1, workers + 1):
            worker = Worker(lease_id, max_in_flight)
            stack.push_async_callback(worker.kill)
            await worker.start()
            self.workers.append(worker)
        self.client = FailoverClient(
            partial(RemoteGenerateClient, "front", request_timeout_s=REQUEST_S),
            members=lambda: [*self.strangers, *(worker.record for worker in self.workers)],
            picker=RoundRobin(),
            on_deltas=self._on_deltas,
            on_ended=self._on_ended,
        )
        await stack.enter_async_context(self.client)
        return self.client

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def have(self, count: int, requests: int) -> None:
        """Waits until each of these requests has at least `count` tokens."""
        await self.until(lambda: sum(len(ids) >= count for ids in self.tokens.values()) == requests)

    async def ended(self, request_id: str) -> None:
        await self.until(lambda: any(i == request_id for i, _ in self.ends))

    def run_freely(self) -> None:
        for worker in self.workers:
            for _ in range(1000):
                worker.steps.release()

    def _on_deltas(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            self.prompts_told += delta.prefill is not None
            if delta.finish_reason is not None:
                self.ends.append((delta.request_id, delta.finish_reason))
        self._changed.set()

    def _on_ended(self, request_id: str, error: DynamoLiteError) -> None:
        self.ends.append((request_id, type(error).__name__))
        self._changed.set()


@pytest.mark.parametrize("plan", [CONTINUE, REPLAY])
async def test_a_killed_worker_s_requests_go_on_exactly(plan: MigrationPlan):
    cluster = Cluster()
    async with AsyncExitStack() as stack:
        client = await cluster.open(stack, 2)
        for number in range(6):
            await client.submit(request_of(number), movable=plan)
        for worker in cluster.workers:
            for _ in range(5):
                worker.steps.release()
        await cluster.have(5, 6)
        await cluster.workers.pop(0).kill()
        client.members_changed()
        cluster.run_freely()
        await cluster.until(lambda: len(cluster.ends) == 6)
        assert cluster.tokens == {f"r{n}": answer_to(n) for n in range(6)}
        assert set(cluster.ends) == {(f"r{n}", "length") for n in range(6)}
        assert cluster.prompts_told == 6
        assert sum(client.stats.moved.values()) == 3
        assert client.in_flight == 0


@pytest.mark.parametrize("how", ["hangs up", "is silent"])
async def test_a_worker_that_does_not_reply_gets_a_request_once_and_another_one_takes_it(how: str):
    got: list[Submit | Cancel] = []

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(encode(Welcome())))
        parser = FrameParser()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                for message in map(decode_client_frame, parser.feed(data)):
                    if isinstance(message, Submit | Cancel):
                        got.append(message)
                        if how == "hangs up":
                            writer.close()
        writer.close()

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
    cluster = Cluster()
    async with server, AsyncExitStack() as stack:
        client = await cluster.open(stack, 1)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        cluster.strangers = [endpoint_record(0, stream=address)]
        cluster.run_freely()
        began = loop_time()
        await client.submit(request_of(1), movable=CONTINUE)
        assert (loop_time() - began < REQUEST_S) == (how == "hangs up")
        await cluster.until(lambda: bool(cluster.ends))
        assert cluster.tokens == {"r1": answer_to(1)} and cluster.ends == [("r1", "length")]
        assert client.stats.moved == {}
    assert sum(isinstance(message, Submit) for message in got) == 1


#: A request may take this much longer than the work itself.
ADDED_S = 0.5


@pytest.mark.parametrize("dead", ["killed", "unreachable"])
async def test_a_dead_worker_costs_a_request_no_more_than_its_connecting(dead: str):
    """Before anybody has noticed that it is dead: both workers look alike."""
    async with AsyncExitStack() as stack:
        cluster = Cluster()
        client = await cluster.open(stack, 2)
        client.transport.retain([worker.record for worker in cluster.workers])
        await client.submit(request_of(0), movable=CONTINUE)
        if dead == "killed":
            await cluster.workers[1].kill()
        else:
            cluster.workers[1] = await stack.enter_async_context(_mute(cluster.workers[1]))
        cluster.run_freely()
        for number in (1, 2):  # by turns: one of them meets it first
            began = loop_time()
            await client.submit(request_of(number), movable=CONTINUE)
            assert loop_time() - began < (ADDED_S if dead == "killed" else CONNECT_S + ADDED_S)
        await cluster.until(lambda: len(cluster.ends) == 3)
        assert cluster.tokens == {f"r{n}": answer_to(n) for n in range(3)}


@contextlib.asynccontextmanager
async def _mute(worker: Worker) -> AsyncIterator[Worker]:
    """It at an address where connections are accepted, as a stopped process's kernel does, and
    nothing is said."""
    await worker.kill()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hang, *parse_address(worker.server.stream_address))
    async with server:
        yield worker
