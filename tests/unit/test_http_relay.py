"""The relay from the Processor to an HTTP server on this host."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
from starlette.types import Receive, Scope, Send

from dynamo_lite.serve.services.frontend.processor import client_of, relay

Relay = Callable[[str, bytes], Awaitable[bytes]]
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def processor(answer: Answer, timeout_s: float = 60.0) -> AsyncIterator[Relay]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with client_of(f"http://127.0.0.1:{port}") as client:
            yield partial(relay, client, timeout_s)


async def test_a_broken_answer_is_an_error():
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")

    async with processor(answer) as relayed:
        got = json.loads(await relayed("completions", b"{}"))
    assert got["error"]["code"] == 500


async def test_no_answer_in_time_is_an_error():
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(100):
            pass

    async with processor(answer, timeout_s=0.1) as relayed:
        got = json.loads(await relayed("completions", b"{}"))
    assert got["error"]["code"] == 504


async def test_a_caller_that_is_cancelled_closes_the_connection():
    asked, closed = asyncio.Event(), asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        while await reader.read(100):
            pass
        closed.set()

    async with processor(answer) as relayed:
        caller = asyncio.ensure_future(relayed("completions", b"{}"))
        await asked.wait()
        caller.cancel()
        await asyncio.wait_for(closed.wait(), 10)


async def test_the_edge_alone_limits_how_many_requests_it_takes():
    asked, number = 0, 101

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        await reader.readuntil(b"\r\n\r\n{}")
        asked += 1
        while asked < number:
            await asyncio.sleep(0.01)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()

    async with processor(answer) as relayed:
        answers = await asyncio.gather(*(relayed("completions", b"{}") for _ in range(number)))
    assert answers == [b"{}"] * number


async def test_a_caller_that_is_cancelled_ends_an_app_of_this_process():
    began = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "http.request"
        began.set()
        await asyncio.Event().wait()

    async with client_of(app) as client:
        asked = asyncio.create_task(relay(client, 60.0, "completions", b"{}"))
        await began.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
    assert asyncio.all_tasks() == {asyncio.current_task()}
