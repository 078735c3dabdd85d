"""The Forwarder's HTTP client, against a server that says exactly what a test scripts."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from dynamo_lite.forward import engines
from dynamo_lite.forward.connection import EngineAnswer
from dynamo_lite.forward.engines import KnownEngine
from dynamo_lite.forward.failures import LegFailed
from dynamo_lite.forward.options import EngineOptions
from dynamo_lite.forward.protocols.nixl import PULL
from dynamo_lite.forward.upstream import Upstream
from tests.builders import eventually
from tests.ports import reserved_port

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
HEALTHY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

Script = Callable[["Served"], Awaitable[None]]


@dataclass
class Served:
    """One request that the server has got. connection: counted from 1."""

    connection: int
    head: bytes
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def say(self, *parts: bytes) -> None:
        """Each part by itself, as far as a socket allows."""
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()


@dataclass
class World:
    upstream: Upstream
    engine: KnownEngine
    server: asyncio.Server
    requests: list[Served] = field(default_factory=list[Served])

    async def open(
        self, method: str = "GET", path: str = "/x", headers: Any = None, body: bytes | None = None
    ) -> EngineAnswer:
        answer = await self.upstream.send(self.engine, "decode", method, path, headers, body)
        try:
            await answer.head()
        except BaseException:
            answer.close()
            raise
        return answer

    async def get(self, method: str = "GET") -> tuple[int, bytes]:
        answer = await self.open(method)
        return answer.status, await answer.read()

    @property
    def connections(self) -> list[int]:
        return [one.connection for one in self.requests]


def known(number: int, port: int) -> KnownEngine:
    return KnownEngine(number, EngineOptions(url=f"http://127.0.0.1:{port}", role="decode"), PULL)


@asynccontextmanager
async def world(*script: Script, idle_s: float = 5.0) -> AsyncIterator[World]:
    """A server that answers its requests by the script, one entry each; the last one repeats."""
    made: list[World] = []
    connections = 0
    handlers: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        number = connections
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                lines = [line.partition(b":") for line in head.split(b"\r\n")]
                length = sum(int(value) for name, _, value in lines if name == b"content-length")
                one = Served(number, head, await reader.readexactly(length), reader, writer)
                requests = made[0].requests
                requests.append(one)
                await script[min(len(requests), len(script)) - 1](one)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            handlers.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    engine = known(0, server.sockets[0].getsockname()[1])
    try:
        async with aclosing(Upstream(idle_s)) as upstream, asyncio.timeout(20):
            made.append(World(upstream, engine, server))
            yield made[0]
    finally:
        server.close()
        if handlers:
            await asyncio.wait(handlers, timeout=5)


def says(*parts: bytes, close: bool = False, hangs: bool = False) -> Script:
    """hangs: until the other side closes the connection."""

    async def script(served: Served) -> None:
        await served.say(*parts)
        if hangs:
            await served.reader.read()
        if close:
            served.writer.close()

    return script


@contextlib.contextmanager
def fails(kind: str) -> Any:
    with pytest.raises(LegFailed) as failed:
        yield
    assert failed.value.kind == kind


async def test_a_request_is_written_as_it_is_and_its_connection_used_again():
    async with world(says(HEALTHY)) as w:
        for _ in range(3):
            answer = await w.open("POST", "/p?q=1", {"x-own": "ä"}, b"{}")
            assert await answer.read() == b"ok"
        assert w.connections == [1, 1, 1]
        host = w.engine.name.encode()
        expected = (
            b"POST /p?q=1 HTTP/1.1\r\nhost: %s\r\nx-own: \xc3\xa4\r\ncontent-length: 2\r\n\r\n"
        )
        assert w.requests[0].head == expected % host and w.requests[0].body == b"{}"


async def test_a_process_that_stands_still_does_not_blame_the_engine(
    monkeypatch: pytest.MonkeyPatch,
):
    """Its event loop goes on only after the connect timeout."""
    loop = asyncio.get_running_loop()
    connect, pauses = loop.create_connection, [2.5]

    def after_a_pause(*args: Any, **kwargs: Any) -> Any:
        if pauses:
            time.sleep(pauses.pop())
        return connect(*args, **kwargs)

    async with world(says(HEALTHY)) as w:
        monkeypatch.setattr(loop, "create_connection", after_a_pause)
        assert await w.get() == (200, b"ok")
        assert pauses == []


@pytest.mark.parametrize("value", ["a\r\nx-evil: 1", "a\nb", "a\0b"])
async def test_no_header_can_add_another_one(value: str):
    async with world(says(HEALTHY)) as w:
        with fails("broken"):
            await w.open(headers={"x": value})
        assert w.requests == []


async def test_answers_in_all_their_forms():
    pieces = [
        CHUNKED[:9],
        CHUNKED[9:],
        b"3\r\nab",
        b"c\r\n",
        b"1;x=y\r\nd\r\n0\r\nx-end: 1\r\n\r\n",
    ]
    forms = {
        "chunked": (says(*pieces), (200, b"abcd")),
        "empty": (says(b"HTTP/1.1 204 No Content\r\n\r\n"), (204, b"")),
        "informed first": (says(b"HTTP/1.1 100 Continue\r\n\r\n", HEALTHY), (200, b"ok")),
        "old": (says(b"HTTP/1.0 200 OK\r\ncontent-length: 1\r\n\r\nz", close=True), (200, b"z")),
    }
    async with world(*(script for script, _ in forms.values())) as w:
        for name, (_, expected) in forms.items():
            assert await w.get() == expected, name


async def test_a_head_request_has_no_body_whatever_the_head_says():
    async with world(says(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n"), says(HEALTHY)) as w:
        assert await w.get("HEAD") == (200, b"")
        assert await w.get() == (200, b"ok")


@pytest.mark.parametrize(
    "parts",
    [
        (b"SSH-2.0-OpenSSH\r\n",),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nabc",),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * (100 << 10),),
        (CHUNKED, b"zz\r\n"),
        (CHUNKED, b"5\r\nabc"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc",),
        (b"HTTP/1.1 200 OK\r\n\r\nno length",),
        (),
    ],
)
async def test_what_is_no_whole_answer_is_broken(parts: tuple[bytes, ...]):
    async with world(says(*parts, close=True), says(HEALTHY)) as w:
        with fails("broken"):
            await w.get()
        assert await w.get() == (200, b"ok")


async def test_a_connection_with_more_than_the_answer_is_not_used_again():
    async with world(says(HEALTHY + b"HTTP/1.1 200 OK\r\n"), says(HEALTHY)) as w:
        assert [await w.get() for _ in range(2)] == [(200, b"ok")] * 2
        assert w.connections == [1, 2]


async def test_a_whole_answer_is_read_up_to_a_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dynamo_lite.forward.failures.MAX_WHOLE_BYTES", 4)
    small, large = (b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % n + b"x" * n for n in (4, 5))
    async with world(says(small), says(large), says(small)) as w:
        assert await w.get() == (200, b"xxxx")
        with fails("too_large"):
            await w.get()
        assert await w.get() == (200, b"xxxx")


async def test_silence_has_an_end_and_no_server_may_listen():
    async with world(says(CHUNKED + b"1\r\na\r\n", hangs=True), idle_s=0.5) as w:
        answer = await w.open()
        assert await answer.read_some() == b"a"
        with fails("timeout"):
            await answer.read_some()
        w.engine = known(1, 1)
        with fails("refused"):
            await w.open()


async def test_a_server_that_has_ended_but_for_a_hanging_request_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
):
    async def goes_on(served: Served) -> None:
        await served.say(CHUNKED)
        for _ in range(10):
            await asyncio.sleep(0.05)
            await served.say(b"1\r\na\r\n")
        await served.say(b"0\r\n\r\n")

    monkeypatch.setattr(engines, "SILENCE_S", 1.0)
    async with world(goes_on, says(hangs=True)) as w:
        draining = await w.open()
        hanging = asyncio.create_task(w.open("POST", body=b"{}"))
        await eventually(lambda: len(w.requests) >= 2)
        w.server.close()
        while not hanging.done():  # at each check
            with fails("refused"):
                await w.upstream.fetch(w.engine, "/health", within_s=5.0)
            await asyncio.wait({hanging}, timeout=0.1)
        with fails("broken"):  # not a timeout: another engine may be asked
            await hanging
        assert await draining.read() == b"a" * 10


async def test_another_port_of_an_engine_may_refuse_while_it_works():
    async with world(says(HEALTHY)) as w:
        with fails("refused"):
            other = "127.0.0.1", reserved_port()
            await w.upstream.fetch(w.engine, "/", within_s=5, at=other)
        ended: list[tuple[str, bool]] = []
        w.engine.on_end.add(lambda *how: ended.append(how))
        w.server.close()
        with fails("refused"):
            await w.get()
        assert ended == [("it refuses connections", True)]


async def test_the_kernel_gives_up_a_host_that_acknowledges_nothing_for_20_s():
    async with world(says(HEALTHY)) as w:
        await w.get()
        (connection,) = w.upstream._open
        assert connection._transport is not None
        sock = connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
