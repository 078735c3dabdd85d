"""Connections on which no whole request head comes, at each of the HTTP servers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from dynamo_lite.runtime import request_head
from dynamo_lite.runtime.process.status import StatusServer, bind
from dynamo_lite.services.frontend.http import HttpServer
from tests.forwarding import rig

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

REQUEST = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@asynccontextmanager
async def frontend() -> AsyncIterator[int]:
    async def ok(_: Any) -> PlainTextResponse:
        return PlainTextResponse("ok")

    with bind("127.0.0.1", 0) as sock:
        server = HttpServer(Starlette(routes=[Route("/health", ok)]), sock)
        await server.start()
        try:
            yield sock.getsockname()[1]
        finally:
            await server.stop(0.0)


@asynccontextmanager
async def status() -> AsyncIterator[int]:
    async with StatusServer(lambda: {"ok": True}, CollectorRegistry()) as server:
        yield int(server.url.rpartition(":")[2])


@asynccontextmanager
async def forwarder() -> AsyncIterator[int]:
    async with rig() as r:
        yield int(r.url.rpartition(":")[2])


@pytest.mark.parametrize("opened", [frontend, status, forwarder])
async def test_a_connection_without_a_whole_head_is_closed_and_no_other(
    monkeypatch: pytest.MonkeyPatch, opened: Any
):
    monkeypatch.setattr(request_head, "HEAD_S", 2.0)
    async with opened() as port, asyncio.timeout(10):
        used, again, begun = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for reader, writer in (used, again):
            writer.write(REQUEST)
            assert (await reader.readuntil(b"HTTP/1.1 200")).endswith(b"200")
        again[1].write(REQUEST[:1])
        begun[1].write(REQUEST[:-1])
        # The last of all: when it is closed, the deadlines of the others are over, too.
        silent = await asyncio.open_connection("127.0.0.1", port)
        for reader, _ in (begun, again, silent):
            await until_closed(reader)
        used[1].write(REQUEST)
        await used[0].readuntil(b"HTTP/1.1 200")
        for _, writer in (used, again, begun, silent):
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


async def until_closed(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        await reader.read()
