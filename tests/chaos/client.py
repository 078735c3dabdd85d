"""One completion request over a connection of its own, and how it ended.

A light client: it shares two cores with the engines. It distinguishes what a client can
distinguish: an answer, a refusal before anything began, a refused connection, and everything else,
which is a lost request.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

PATIENCE_S = 110.0
#: The timeout that the server gets: a little less, so that its error arrives.
_TIMEOUT_HEADER_S = 100


@dataclass
class Answer:
    """tokens: by choice. finish: by choice. usage: completion tokens.

    first_s: seconds until the first token. arrivals: when each piece of a stream came
    (`time.monotonic()`).
    """

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    usage: int = 0
    first_s: float = 0.0
    arrivals: list[float] = field(default_factory=list)

    @property
    def gap_s(self) -> float:
        """The longest time between two pieces of a stream."""
        return max((b - a for a, b in pairwise(self.arrivals)), default=0.0)

    def same(self, other: "Answer") -> bool:
        return (self.tokens, self.finish, self.usage) == (other.tokens, other.finish, other.usage)


class Refused(Exception):
    """Not begun: 429 or 503, or the connection was refused. Retry later."""

    def __init__(self, kind: str, retry_after_s: float, text: str = ""):
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.retry_after_s = retry_after_s


class Broken(Exception):
    """The connection ended before the answer did. begun: after its head."""

    def __init__(self, text: str, *, begun: bool):
        super().__init__(text)
        self.kind, self.begun = "broken connection", begun


class Failed(Exception):
    """An error instead of an answer, or in the middle of one (begun). kind: for counting."""

    def __init__(self, kind: str, text: str, *, begun: bool):
        super().__init__(f"{kind}: {text}")
        self.kind, self.begun = kind, begun


async def ask(
    port: int, body: dict[str, Any], host: str = "127.0.0.1", api_key: str = ""
) -> Answer:
    """Raises Refused, Broken, Failed, or TimeoutError after PATIENCE_S.

    Cancelling it closes the connection at once, as a client that has left.
    """
    async with asyncio.timeout(PATIENCE_S):
        try:
            reader, writer = await asyncio.open_connection(host, port, limit=1 << 24)
        except OSError as exc:
            raise Refused("connect", 0.5, str(exc)) from exc
        begun = False
        try:
            sent = time.monotonic()
            status, headers = await _send(reader, writer, body, api_key)
            begun = True
            return await _receive(reader, status, headers, body, sent)
        except (OSError, asyncio.IncompleteReadError) as exc:
            raise Broken(str(exc), begun=begun) from exc
        finally:
            writer.transport.abort()


async def _send(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict[str, Any], api_key: str
) -> tuple[int, dict[str, str]]:
    """Returns the head of the answer."""
    payload = json.dumps(body).encode()
    known = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: chaos\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\n"
        + f"{known}X-Request-Timeout: {_TIMEOUT_HEADER_S}\r\n".encode()
        + f"Content-Length: {len(payload)}".encode()
        + b"\r\n\r\n"
        + payload
    )
    return await _head(reader)


async def _receive(
    reader: asyncio.StreamReader,
    status: int,
    headers: dict[str, str],
    body: dict[str, Any],
    sent: float,
) -> Answer:
    if status != 200:
        text = (await _whole(reader, headers)).decode(errors="replace")
        _raise(status, headers, text)
    if body["stream"]:
        return await _streamed(reader, sent)
    answer = Answer()
    _take(answer, json.loads(await _whole(reader, headers)))
    answer.first_s = time.monotonic() - sent
    return answer


async def _streamed(reader: asyncio.StreamReader, sent: float) -> Answer:
    answer, done = Answer(), False
    async for event in _events(reader):
        if event == b"[DONE]":
            done = True
            continue
        message = json.loads(event)
        if "error" in message:
            error = message["error"]
            code = error.get("code") if isinstance(error, dict) else ""
            raise Failed(f"event {code}", str(error), begun=True)
        _take(answer, message)
        answer.arrivals.append(time.monotonic())
    if not done:
        raise Broken("the stream ended early", begun=True)
    if answer.arrivals:
        answer.first_s = answer.arrivals[0] - sent
    return answer


def _take(answer: Answer, message: dict[str, Any]) -> None:
    if message.get("usage"):
        answer.usage = message["usage"]["completion_tokens"]
    for choice in message["choices"]:
        index = choice["index"]
        answer.tokens.setdefault(index, []).extend(choice.get("token_ids") or ())
        if choice.get("finish_reason"):
            answer.finish[index] = choice["finish_reason"]


def _raise(status: int, headers: dict[str, str], text: str) -> None:
    if status in (429, 503) and "retry-after" in headers:
        raise Refused(str(status), float(headers["retry-after"]), text[:300])
    raise Failed(str(status), text[:500], begun=False)


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in head[1:] if line)
    return int(head[0].split()[1]), {k.lower(): v.strip() for k, _, v in pairs}


async def _whole(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"]))
    return b"".join([chunk async for chunk in _chunks(reader)])


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event, also of those that share a chunk."""
    rest = b""
    async for chunk in _chunks(reader):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield line[6:].strip()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Of a body with chunked transfer encoding."""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
