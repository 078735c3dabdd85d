"""The benchmarks' client, over sockets: what counts as an answer, and from when its first token is
counted."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from benchmarks.streams import offer_load, stream_load

PATH, BODY = "/v1/chat/completions", {"max_tokens": 2}
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nserver: 0\r\n\r\n"
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"delta":{"content":"b"}}]}\n\n'
ERROR = b'data: {"error":{"message":"no worker"}}\n\n'
DONE = b"data: [DONE]\n\n"
LAST = b"0\r\n\r\n"

Send = Callable[[bytes], Awaitable[None]]
Answer = Callable[[Send], Awaitable[None]]


class HangUp(Exception):
    """An answer raises it to have its connection closed."""


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@asynccontextmanager
async def answering(answer: Answer) -> AsyncIterator[int]:
    """A server that answers each request of a connection so; gives its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def send(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
                await reader.readexactly(int(length))
                await answer(send)
        except (asyncio.IncompleteReadError, HangUp):
            return
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def whole(send: Send) -> None:
    await send(HEAD)
    await send(chunk(ROLE))
    await send(chunk(TOKEN) + chunk(TOKEN) + chunk(DONE) + LAST)


async def test_an_answer_is_counted_from_its_time_to_its_first_text():
    async def slow(send: Send) -> None:
        await send(HEAD + chunk(ROLE))
        await asyncio.sleep(0.1)
        await send(chunk(TOKEN) + chunk(DONE) + LAST)

    async with answering(slow) as port:
        began = time.perf_counter()
        offered = await offer_load(port, PATH, BODY, [-0.5, 0.0, 0.05])
        ended = time.perf_counter()
    assert offered.failures == []
    late, *in_time = offered.seen.first_s
    assert late >= 0.6
    assert all(first_s >= 0.1 for first_s in in_time)
    assert offered.seen.events == 3 * 2
    assert began + 0.15 <= offered.ends_s[-1] <= ended
    assert 0.15 <= offered.seen.seconds <= ended - began


async def test_requests_do_not_wait_for_the_answers_to_earlier_ones():
    all_there = asyncio.Event()
    waiting: list[Send] = []

    async def together(send: Send) -> None:
        waiting.append(send)
        if len(waiting) == 5:
            all_there.set()
        await all_there.wait()
        await whole(send)

    async with answering(together) as port:
        offered = await offer_load(port, PATH, BODY, [0.01 * number for number in range(5)])
    assert offered.failures == []
    assert len(offered.ends_s) == len(offered.seen.first_s) == 5


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n"], "answered HTTP/1.1 503 Busy"),
        ([HEAD, chunk(TOKEN), chunk(ERROR), chunk(DONE) + LAST], "an answer failed: .*no worker"),
        ([HEAD, chunk(ROLE), chunk(DONE) + LAST], "an answer without text"),
        ([HEAD + chunk(TOKEN)], "closed in the middle"),
    ],
)
async def test_an_answer_that_fails_is_not_counted_as_one(parts: list[bytes], why: str):
    asked = 0

    async def second_fails(send: Send) -> None:
        nonlocal asked
        asked += 1
        if asked != 2:
            await whole(send)
            return
        for part in parts:
            await send(part)
        raise HangUp

    async with answering(second_fails) as port:
        offered = await offer_load(port, PATH, BODY, [0.0, 0.05, 0.1])
    assert len(offered.ends_s) == 2
    [failure] = offered.failures
    assert re.search(why, failure)


async def test_a_kept_connection_is_asked_again_and_a_failure_ends_the_load():
    async with answering(whole) as port:
        seen = await stream_load(port, PATH, BODY, requests=5, concurrency=2, spread_s=0.0)
    assert len(seen.first_s) == 5
    assert seen.events == 5 * 3

    async def refusing(send: Send) -> None:
        await send(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n")

    async with answering(refusing) as port:
        with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="answered HTTP/1.1 503")):
            await stream_load(port, PATH, BODY, requests=1, concurrency=1, spread_s=0.0)
