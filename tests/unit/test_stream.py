"""The token plane's frames and connections, fed with good and bad bytes."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_lite.protocol.codec import MAX_MESSAGE_BYTES
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.request_plane import framing
from dynamo_lite.request_plane.framing import FrameConnection, FrameParser, frame, parse_address
from dynamo_lite.runtime.address import host_port
from tests.certificate_folders import graph_folder, of


class Receiver:
    def __init__(self) -> None:
        self.payloads: asyncio.Queue[bytes] = asyncio.Queue()
        self.closed: asyncio.Queue[str] = asyncio.Queue()
        self.connection: FrameConnection | None = None

    def frame_received(self, connection: FrameConnection, payload: bytes) -> None:
        self.connection = connection
        self.payloads.put_nowait(payload)


class Receiving(FrameConnection):
    def __init__(self, receiver: Receiver):
        super().__init__()
        self._receiver = receiver

    def frame_received(self, payload: bytes) -> None:
        self._receiver.frame_received(self, payload)

    def connection_closed(self, why: str) -> None:
        self._receiver.closed.put_nowait(why)


@asynccontextmanager
async def listening(receiver: Receiver) -> AsyncIterator[int]:
    server = await asyncio.get_running_loop().create_server(
        lambda: Receiving(receiver), "127.0.0.1", 0
    )
    async with server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def peer(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 12)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=20), st.data())
def test_any_cut_of_the_stream_gives_the_same_frames(payloads: list[bytes], data: st.DataObject):
    stream = b"".join(frame(payload) for payload in payloads)
    parser = FrameParser()
    got: list[bytes] = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        got += parser.feed(stream[:size])
        stream = stream[size:]
    assert got == payloads


@given(st.lists(st.binary(max_size=64), max_size=20))
def test_arbitrary_bytes_give_frames_or_a_protocol_error(chunks: list[bytes]):
    parser = FrameParser(first_max_bytes=32)
    try:
        for chunk in chunks:
            assert all(payload for payload in parser.feed(chunk))
    except ProtocolError:
        pass


@pytest.mark.parametrize("length", [0, MAX_MESSAGE_BYTES + 1, 0xFFFFFFFF])
def test_a_length_out_of_bounds_is_refused_before_its_bytes_arrive(length: int):
    with pytest.raises(ProtocolError):
        FrameParser().feed(length.to_bytes(4, "big"))


@pytest.mark.parametrize("payload", [b"", bytes(MAX_MESSAGE_BYTES + 1)])
def test_a_frame_out_of_bounds_is_not_made(payload: bytes):
    with pytest.raises(ProtocolError):
        frame(payload)


def test_addresses_round_trip_and_what_is_none_is_refused():
    for address in ("127.0.0.1:80", "[::1]:65535", "worker-1:9"):
        assert host_port(*parse_address(address)) == address
    for address in ("", "host", "host:", ":80", "host:port", "host:65536"):
        with pytest.raises(ProtocolError):
            parse_address(address)


class Watched(Receiving):
    """Puts its socket into a queue."""

    def __init__(self, receiver: Receiver, sockets: "asyncio.Queue[socket.socket]"):
        super().__init__(receiver)
        self._sockets = sockets

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._sockets.put_nowait(transport.get_extra_info("socket"))


@pytest.mark.parametrize("encrypted", [False, True])
async def test_both_ends_give_up_a_host_that_acknowledges_nothing_for_20_s(
    encrypted: bool, tmp_path: Path
):
    loop, receiver = asyncio.get_running_loop(), Receiver()
    folder = graph_folder(tmp_path) if encrypted else tmp_path
    sockets: asyncio.Queue[socket.socket] = asyncio.Queue()
    server = await loop.create_server(
        lambda: Watched(receiver, sockets),
        "127.0.0.1",
        0,
        ssl=of(folder, "VllmWorker").server() if encrypted else None,
    )
    async with asyncio.timeout(5), server:
        port = server.sockets[0].getsockname()[1]
        transport, _ = await loop.create_connection(
            lambda: Watched(receiver, sockets),
            "127.0.0.1",
            port,
            ssl=of(folder, "Frontend").client() if encrypted else None,
        )
        for end in [await sockets.get() for _ in range(2)]:
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        transport.abort()
        for _ in range(2):
            await receiver.closed.get()


async def test_a_silent_peer_is_cut_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(framing, "FIRST_FRAME_TIMEOUT_S", 0.05)
    receiver = Receiver()
    async with listening(receiver) as port, peer(port):
        async with asyncio.timeout(5):
            assert "no frame within" in await receiver.closed.get()


@pytest.mark.parametrize(
    ("limit", "value", "why"),
    [("STALL_TIMEOUT_S", 0.1, "timed out"), ("MAX_UNSENT_BYTES", 4 << 20, "unread")],
)
async def test_a_peer_that_does_not_read_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: float, why: str
):
    monkeypatch.setattr(framing, limit, value)
    receiver = Receiver()
    async with listening(receiver) as port, peer(port) as (_, writer):
        writer.write(frame(b"hello"))
        async with asyncio.timeout(10):
            await receiver.payloads.get()
            assert receiver.connection is not None
            for _ in range(16):
                receiver.connection.send(frame(bytes(1 << 20)))
            assert why in await receiver.closed.get()
