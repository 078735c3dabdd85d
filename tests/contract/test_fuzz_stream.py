"""Hostile peers on both ends of a token stream, and on a worker's request subject."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_lite.protocol.codec import MAX_MESSAGE_BYTES, WIRE_VERSION, encode
from dynamo_lite.protocol.errors import DynamoLiteError, ProtocolError
from dynamo_lite.protocol.generate import (
    Accepted,
    Cancel,
    Deltas,
    GenerateRequest,
    Hello,
    LogprobRows,
    PrefillCounts,
    RequestRefused,
    TokenDelta,
    Welcome,
    decode_client_frame,
    decode_generate_reply,
    decode_generate_request,
    decode_worker_frame,
)
from dynamo_lite.protocol.records import EndpointRecord, EndpointTransport
from dynamo_lite.request_plane.client import RemoteGenerateClient
from dynamo_lite.request_plane.framing import FrameParser, frame, parse_address
from dynamo_lite.request_plane.server import GenerateServer
from dynamo_lite.simulation.servers.memory import MemoryMessaging
from tests.hostile import Spoiler

FUZZ = settings(deadline=None, derandomize=True, max_examples=60)
#: Not hypothesis's own random: sockets do not keep to one order.
RNG = st.integers(0, (1 << 32) - 1).map(Random)
SUBJECT, BAD_SUBJECT = "t_worker.generate-1", "t_worker.generate-2"
#: Of the true client's first connection.
ITS_ID = "frontend.1"


def request_of(request_id: str, client_id: str = "") -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        client_id=client_id,
        prompt_token_ids=[1, 2, 3],
        sampling=b"\x80",
        arrival_time=1.0,
    )


def member_at(stream: str, subject: str) -> EndpointRecord:
    return EndpointRecord(
        component="VllmWorker",
        endpoint="generate",
        namespace="t",
        lease_id=1,
        transport=EndpointTransport(nats_tcp=subject, stream=stream),
    )


class Engine:
    """Implements GenerateHandler: takes everything."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.aborted: list[str] = []

    async def submit(self, request: GenerateRequest) -> None:
        self.taken.append(request.request_id)

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids


class Graph:
    """A worker and a client of it; `ends` counts how often each request ended."""

    def __init__(self) -> None:
        self.drops: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.got: dict[str, list[int]] = {}
        self.messaging, self.engine = MemoryMessaging(), Engine()
        self.server = GenerateServer(self.messaging, self.engine, on_drop=self._drop)
        self.client = RemoteGenerateClient(
            self.messaging,
            "frontend",
            self._on_deltas,
            self._on_lost,
            on_drop=self._drop,
        )

    def _drop(self, where: str) -> None:
        self.drops[where] += 1

    def _on_deltas(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            assert not self.ends[delta.request_id], "a delta behind the end"
            self.got.setdefault(delta.request_id, []).extend(delta.token_ids)
            self.ends[delta.request_id] += delta.finish_reason is not None

    def _on_lost(self, request_ids: list[str], why: str) -> None:
        self.ends.update(request_ids)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.server, self.server.serve(SUBJECT), self.client:
            yield

    async def answer(self, *request_ids: str) -> None:
        """Submits requests to the true worker, and sees that they are answered."""
        member = member_at(self.server.stream_address, SUBJECT)
        for request_id in request_ids:
            await self.client.submit(member, request_of(request_id))
        await self.finish(*request_ids)

    async def finish(self, *request_ids: str) -> None:
        for token in (7, 8, 9):
            finish = "stop" if token == 9 else None
            self.server.deliver(
                [TokenDelta(request_id=i, token_ids=[token], finish_reason=finish)
                 for i in request_ids]
            )  # fmt: skip
        async with asyncio.timeout(5):
            while any(not self.ends[i] for i in request_ids):
                await asyncio.sleep(0)
        for request_id in request_ids:
            assert self.got[request_id] == [7, 8, 9] and self.ends[request_id] == 1
            assert request_id not in self.engine.aborted


CLIENT_FRAMES = [
    frame(encode(Hello(client_id="x"))),
    frame(encode(Hello(client_id=ITS_ID))),
    frame(encode(Hello(client_id="x", wire_version=WIRE_VERSION + 1))),
    frame(encode(Cancel(request_ids=["a", "b"]))),
    frame(encode(Hello(client_id="x"))) + frame(encode(Cancel(request_ids=["a", "b", "a"]))),
    frame(encode(Welcome())),
    frame(encode(Accepted())),
    (MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"),
    bytes(4),
]


def is_refused(sent: bytes) -> bool:
    """Whether a worker, to whom `ITS_ID` is connected, hangs up on a client that sends this."""
    greeted = False
    try:
        for payload in FrameParser().feed(sent):
            message = decode_client_frame(payload)
            if isinstance(message, Hello):
                if greeted or message.client_id == ITS_ID or message.wire_version != WIRE_VERSION:
                    return True
                greeted = True
            elif not greeted:
                return True
    except ProtocolError:
        return True
    return False


async def whisper(address: str, sent: bytes) -> None:
    """Connects, sends this, and waits until the worker has closed its side."""
    reader, writer = await asyncio.open_connection(*parse_address(address))
    with contextlib.suppress(ConnectionError):
        writer.write(sent)
        writer.write_eof()
        async with asyncio.timeout(5):
            await reader.read()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@FUZZ
@given(rng=RNG)
def test_hostile_clients_take_nothing_from_a_true_one(rng: Random):
    spoiler = Spoiler(rng)

    async def main() -> None:
        graph = Graph()
        async with graph.running():
            member = member_at(graph.server.stream_address, SUBJECT)
            for request_id in ("a", "b"):
                await graph.client.submit(member, request_of(request_id))
            refused = 0
            for _ in range(6):
                frames = [rng.choice(CLIENT_FRAMES) for _ in range(rng.randint(1, 3))]
                sent = b"".join(spoiler.spoil(f) if rng.random() < 0.5 else f for f in frames)
                refused += is_refused(sent)
                await whisper(graph.server.stream_address, sent)
            assert graph.drops["stream"] == refused
            await graph.finish("a", "b")
            assert graph.engine.aborted == [] and graph.server.in_flight == 0
            await graph.answer("c")

    asyncio.run(main())


@FUZZ
@given(rng=RNG)
def test_hostile_requests_are_refused_or_end_with_everything(rng: Random):
    spoiler = Spoiler(rng)
    true = [request_of("a", ITS_ID), request_of("x", ITS_ID), request_of("x", "nobody")]

    async def main() -> None:
        graph = Graph()
        async with graph.running():
            member = member_at(graph.server.stream_address, SUBJECT)
            await graph.client.submit(member, request_of("a"))
            broken = 0
            for _ in range(12):
                payload = encode(rng.choice(true))
                payload = spoiler.spoil(payload) if rng.random() < 0.8 else payload
                try:
                    decode_generate_request(payload)
                except ProtocolError:
                    broken += 1
                    await graph.messaging.publish(SUBJECT, payload)
                else:
                    reply = await graph.messaging.request(SUBJECT, payload, timeout_s=5)
                    decode_generate_reply(reply)
            await graph.finish("a")
            assert graph.drops["generate"] == broken
            # What the engine was given in the true client's name goes on unseen, until it ends.
            others = [i for i in graph.engine.taken if i != "a"]
            assert graph.engine.taken.count("a") == 1 and graph.got.keys() == {"a"}
            graph.server.deliver(
                [TokenDelta(request_id=i, token_ids=[], finish_reason="stop") for i in others]
            )
            assert graph.server.in_flight == 0
            await graph.answer("c")

    asyncio.run(main())


ROWS = LogprobRows(1, 1, bytes(8), bytes(4), bytes(8))
COUNTS = PrefillCounts(3, 1, 1, 0.5, 0.25)
WORKER_FRAMES = [
    frame(encode(message))
    for message in (
        Welcome(),
        Deltas(deltas=[TokenDelta(request_id="a", token_ids=[7])]),
        Deltas(deltas=[TokenDelta(request_id="a", token_ids=[7], prefill=COUNTS, logprobs=ROWS)]),
        Deltas(deltas=[TokenDelta(request_id="a", token_ids=[], finish_reason="stop")]),
        Deltas(deltas=[TokenDelta(request_id="b", token_ids=[1, 2]),
                       TokenDelta(request_id="x", token_ids=[3], finish_reason="stop")]),
        Hello(client_id="x"),
    )
]  # fmt: skip
REPLIES = [
    encode(Accepted()),
    encode(RequestRefused(reason="no", elsewhere=False)),
    encode(RequestRefused(reason="full", elsewhere=True, busy=True)),
    encode(RequestRefused(reason="no stream from this client", elsewhere=False)),
    encode(Hello(client_id="x")),
]


class HostileWorker:
    """Answers requests, and writes to whoever connects, as `rng` says; then hangs up."""

    def __init__(self, rng: Random):
        self._rng, self._spoiler = rng, Spoiler(rng)
        self._writers: list[asyncio.StreamWriter] = []
        self.broken_replies = 0

    async def on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._writers.append(writer)
        welcomes = self._rng.random() < 0.9
        if welcomes:
            writer.write(WORKER_FRAMES[0])
        self.babble()
        if not welcomes:
            return writer.close()
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 16):
                self.babble()
        writer.close()

    def babble(self) -> None:
        for writer in self._writers:
            if writer.is_closing() or self._rng.random() < 0.5:
                continue
            for _ in range(self._rng.randint(0, 3)):
                data = self._rng.choice(WORKER_FRAMES)
                writer.write(self._spoiler.spoil(data) if self._rng.random() < 0.3 else data)

    async def on_request(self, _payload: bytes) -> bytes:
        self.babble()
        reply = self._rng.choice(REPLIES)
        reply = self._spoiler.spoil(reply) if self._rng.random() < 0.4 else reply
        try:
            decode_generate_reply(reply)
        except ProtocolError:
            self.broken_replies += 1
        return reply

    def hang_up(self) -> None:
        for writer in self._writers:
            writer.close()


@FUZZ
@given(rng=RNG)
def test_whatever_a_hostile_worker_says_each_request_ends_once(rng: Random):
    async def main() -> None:
        graph, worker = Graph(), HostileWorker(rng)
        server = await asyncio.start_server(worker.on_connection, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        bad = member_at(address, BAD_SUBJECT)
        accepted: list[str] = []
        async with server, graph.running(), graph.messaging.serve(BAD_SUBJECT, worker.on_request):
            for request_id in ("a", "b", "c", "d"):
                try:
                    await graph.client.submit(bad, request_of(request_id))
                except DynamoLiteError:
                    assert request_id not in graph.ends and request_id not in graph.got
                else:
                    accepted.append(request_id)
                worker.babble()
            assert graph.drops["generate_reply"] <= worker.broken_replies
            worker.hang_up()
            async with asyncio.timeout(5):
                while any(not graph.ends[i] for i in accepted):
                    await asyncio.sleep(0)
            assert all(graph.ends[i] == 1 for i in accepted)
            assert graph.got.keys() <= set(accepted)
            await graph.answer("e")

    asyncio.run(main())


@FUZZ
@given(rng=RNG)
def test_what_is_no_frame_of_a_worker_is_refused_before_it_is_looked_at(rng: Random):
    """Whatever passes has sizes, counts and times that can be computed with."""
    sent = Spoiler(rng).spoil(rng.choice(WORKER_FRAMES))
    try:
        messages = [decode_worker_frame(payload) for payload in FrameParser().feed(sent)]
    except ProtocolError:
        return
    for message in messages:
        for delta in message.deltas if isinstance(message, Deltas) else ():
            assert all(0 <= token < 1 << 31 for token in delta.token_ids)
            if delta.prefill is not None:
                assert 0 <= delta.prefill.waited_s <= 1e9 and 0 <= delta.prefill.prefill_s <= 1e9
            if delta.logprobs is not None:
                assert delta.logprobs.rows >= 0 and delta.logprobs.width >= 0
