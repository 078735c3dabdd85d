"""Hostile peers on both ends of a token stream."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_lite.protocol.codec import WIRE_VERSION, encode
from dynamo_lite.protocol.errors import DynamoLiteError, ProtocolError
from dynamo_lite.protocol.generate import (
    MAX_SUBMIT_BYTES,
    Accepted,
    Cancel,
    Deltas,
    GenerateRequest,
    Hello,
    LogprobRows,
    PrefillCounts,
    RequestRefused,
    Submit,
    SubmitReply,
    TokenDelta,
    Welcome,
    decode_client_frame,
)
from dynamo_lite.request_plane.client import RemoteGenerateClient
from dynamo_lite.request_plane.framing import FrameParser, frame, parse_address
from dynamo_lite.request_plane.server import GenerateServer
from dynamo_lite.request_plane.session import MAX_HELLO_BYTES
from tests.builders import endpoint_record, generate_request
from tests.contract.generating import FakeEngine
from tests.hostile import Spoiler

FUZZ = settings(derandomize=True, max_examples=60)
#: Not hypothesis's own random: sockets do not keep to one order.
RNG = st.integers(0, (1 << 32) - 1).map(Random)


class Graph:
    """A worker and a client of it; `ends` counts how often each request ended."""

    def __init__(self) -> None:
        self.drops: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.got: dict[str, list[int]] = {}
        self.engine = FakeEngine()
        self.server = GenerateServer(self.engine, on_drop=self._drop)
        self.client = self.client_of("frontend")

    def client_of(self, client_id: str, **timeouts: float) -> RemoteGenerateClient:
        return RemoteGenerateClient(
            client_id, self._on_deltas, self._on_lost, on_drop=self._drop, **timeouts
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
        async with self.server, self.client:
            yield

    async def answer(self, *request_ids: str) -> None:
        """Submits requests to the true worker, and sees that they are answered."""
        member = endpoint_record(stream=self.server.stream_address)
        for request_id in request_ids:
            await self.client.submit(member, generate_request(request_id))
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


def submit_of(request: GenerateRequest) -> bytes:
    return frame(encode(Submit(request_id=request.request_id, request=encode(request))))


CLIENT_FRAMES = [
    frame(encode(Hello(client_id="x"))),
    frame(encode(Hello(client_id="frontend"))),  # as the true client
    frame(encode(Hello(client_id="x", wire_version=WIRE_VERSION + 1))),
    frame(encode(Cancel(request_ids=["a", "b"]))),
    frame(encode(Hello(client_id="x"))) + frame(encode(Cancel(request_ids=["a", "b", "a"]))),
    submit_of(generate_request("h")),
    frame(encode(Hello(client_id="x"))) + submit_of(generate_request("h")),
    frame(encode(Hello(client_id="x"))) + submit_of(generate_request("a")) * 2,
    frame(encode(Welcome())),
    frame(encode(Accepted())),
    (MAX_SUBMIT_BYTES + 1).to_bytes(4, "big"),
    bytes(4),
]


def is_refused(sent: bytes) -> bool:
    """Whether a worker disconnects a client that sends this."""
    greeted = False
    try:
        for payload in FrameParser(MAX_HELLO_BYTES, MAX_SUBMIT_BYTES).feed(sent):
            message = decode_client_frame(payload)
            if isinstance(message, Hello):
                if greeted or message.wire_version != WIRE_VERSION:
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
            member = endpoint_record(stream=graph.server.stream_address)
            for request_id in ("a", "b"):
                await graph.client.submit(member, generate_request(request_id))
            refused = 0
            for _ in range(6):
                frames = [rng.choice(CLIENT_FRAMES) for _ in range(rng.randint(1, 3))]
                sent = b"".join(spoiler.spoil(f) if rng.random() < 0.5 else f for f in frames)
                refused += is_refused(sent)
                await whisper(graph.server.stream_address, sent)
            assert graph.drops["stream"] == refused
            await graph.finish("a", "b")
            assert await graph.server.wait_idle(5)
            theirs = set(graph.engine.taken) - {"a", "b"}
            assert theirs <= set(graph.engine.aborted)
            assert graph.engine.taken[:2] == ["a", "b"] and "a" not in graph.engine.taken[2:]
            await graph.answer("c")

    asyncio.run(main())


async def test_a_large_first_frame_is_refused_before_its_bytes_arrive_and_fills_no_log(
    caplog: pytest.LogCaptureFixture,
):
    graph = Graph()
    async with graph.running(), asyncio.timeout(4):  # less than the timeout of a first frame
        address = parse_address(graph.server.stream_address)
        for _ in range(20):
            reader, writer = await asyncio.open_connection(*address)
            writer.write((1 << 20).to_bytes(4, "big"))
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
        assert graph.drops["stream"] == 20
    assert caplog.text.count("malformed frame") == 1


ROWS = LogprobRows(1, 1, bytes(8), bytes(4), bytes(8))
COUNTS = PrefillCounts(3, 1, 1, 0.5, 0.25)
WORKER_FRAMES = [
    frame(encode(message))
    for message in (
        Welcome(),
        SubmitReply(request_id="a", reply=Accepted()),
        SubmitReply(request_id="b", reply=RequestRefused(reason="no", elsewhere=False)),
        Deltas(deltas=[TokenDelta(request_id="a", token_ids=[7])]),
        Deltas(deltas=[TokenDelta(request_id="a", token_ids=[7], prefill=COUNTS, logprobs=ROWS)]),
        Deltas(deltas=[TokenDelta(request_id="a", token_ids=[], finish_reason="stop")]),
        Deltas(deltas=[TokenDelta(request_id="b", token_ids=[1, 2]),
                       TokenDelta(request_id="x", token_ids=[3], finish_reason="stop")]),
        Hello(client_id="x"),
    )
]  # fmt: skip
REPLIES = [
    Accepted(),
    RequestRefused(reason="no", elsewhere=False),
    RequestRefused(reason="full", elsewhere=True, busy=True),
]


class HostileWorker:
    """Writes to each client that connects, and replies to requests, as drawn from `rng`; then
    disconnects."""

    def __init__(self, rng: Random):
        self._rng, self._spoiler = rng, Spoiler(rng)
        self._writers: list[asyncio.StreamWriter] = []

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
        parser = FrameParser()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                self.babble()
                for payload in parser.feed(data):
                    message = decode_client_frame(payload)
                    if isinstance(message, Submit):
                        self._reply(writer, message.request_id)
        writer.close()

    def babble(self) -> None:
        for writer in self._writers:
            if self._rng.random() < 0.5:
                continue
            for _ in range(self._rng.randint(0, 3)):
                self._write(writer, self._rng.choice(WORKER_FRAMES), 0.3)

    def _reply(self, writer: asyncio.StreamWriter, request_id: str) -> None:
        reply = self._rng.choice(REPLIES)
        self._write(writer, frame(encode(SubmitReply(request_id=request_id, reply=reply))), 0.4)

    def _write(self, writer: asyncio.StreamWriter, data: bytes, spoilt: float) -> None:
        if not writer.is_closing():
            writer.write(self._spoiler.spoil(data) if self._rng.random() < spoilt else data)

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
        bad = endpoint_record(stream=address)
        accepted: list[str] = []
        # It may reply to another request than to the one that waits.
        hasty = graph.client_of("hasty", request_timeout_s=0.05)
        async with server, graph.running(), hasty:
            for request_id in ("a", "b", "c", "d"):
                try:
                    await hasty.submit(bad, generate_request(request_id))
                except DynamoLiteError:
                    assert request_id not in graph.ends and request_id not in graph.got
                else:
                    accepted.append(request_id)
                worker.babble()
            worker.hang_up()
            async with asyncio.timeout(5):
                while any(not graph.ends[i] for i in accepted):
                    await asyncio.sleep(0)
            assert all(graph.ends[i] == 1 for i in accepted)
            assert graph.got.keys() <= set(accepted)
            await graph.answer("e")

    asyncio.run(main())
