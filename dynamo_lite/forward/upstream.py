"""HTTP requests to engines, over connections that are kept and used again.

This is a special client, because a Forwarder mainly passes on pieces of answers. With a general
client, which has a stream reader of its own, a token costs several times as much.
"""

import asyncio
import ssl
from collections.abc import Mapping
from functools import lru_cache
from typing import Self
from urllib.parse import urlsplit

from multidict import CIMultiDict

from dynamo_lite.forward.connection import EngineAnswer, UpstreamConnection
from dynamo_lite.forward.engines import KnownEngine
from dynamo_lite.forward.failures import LegFailed, LegKind

_CONNECT_S = 2.0
#: Below uvicorn's default of 5 s: a connection must not be used while the engine closes it.
_KEEP_ALIVE_S = 4.0
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
#: Methods that are sent again when a kept connection turns out to be closed.
_REPEATED = frozenset({"GET", "HEAD", "OPTIONS"})

#: A connect timeout that comes so much too late, as a share of itself, says that this process has
#: stood still, and nothing about the engine: it is tried again.
_LATE = 0.1

_Address = tuple[str, int]
#: The key includes how the certificate was checked, so that a connection is not reused where a
#: stricter check applies.
_Place = tuple[_Address, ssl.SSLContext | None]


class Upstream:
    """Async context manager. idle_s: longest time without any byte of an answer."""

    def __init__(self, idle_s: float):
        self._idle_s = idle_s
        self._open: dict[UpstreamConnection, _Address] = {}
        #: Idle connections, with the time when each became idle; the last one is used first.
        self._idle: dict[_Place, list[tuple[UpstreamConnection, float]]] = {}
        self._sweep: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in self._open:
            connection.abort()
        await asyncio.sleep(0)  # the loop closes them now

    async def open(
        self,
        engine: KnownEngine,
        leg: LegKind,
        method: str,
        url: str,
        headers: Mapping[str, str] | CIMultiDict[str] | None = None,
        body: bytes | None = None,
    ) -> EngineAnswer:
        """The answer's head; its body is still to be read. url: with its query, encoded.

        Raises LegFailed. The caller closes the answer: `close` drops the connection if the answer
        has not ended, and the engine then aborts the request.
        """
        host, _, path = url.partition("://")[2].partition("/")
        address = _address(host)
        tls = engine.tls if url.startswith("https:") else None
        try:
            head = _head(method, f"/{path}", host, headers or {}, body)
        except ValueError as exc:
            raise LegFailed(engine, leg, "broken", str(exc)) from exc
        while True:
            connection = self._kept((address, tls))
            reused = connection is not None
            if connection is None:
                connection = await self._connect(engine, leg, address, tls)
            bodyless = method == "HEAD"
            answer = connection.ask(engine, leg, head, body, self._idle_s, bodyless=bodyless)
            try:
                await answer.head()
                return answer
            except LegFailed as exc:
                if exc.kind != "broken" or not (reused and method in _REPEATED):
                    raise
            except BaseException:
                answer.close()
                raise

    async def fetch(self, engine: KnownEngine, url: str, *, within_s: float) -> tuple[int, bytes]:
        """A small page. Raises LegFailed."""
        try:
            async with asyncio.timeout(within_s):
                answer = await self.open(engine, "check", "GET", url)
                try:
                    return answer.status, await answer.read()
                finally:
                    answer.close()
        except TimeoutError as exc:
            text = f"no answer within {within_s:g} s"
            raise LegFailed(engine, "check", "timeout", text) from exc

    def heard_at(self, engine: KnownEngine) -> float:
        """When an open connection to the engine had its last bytes, in the loop's time; 0: none
        had any."""
        return max((one.heard_at for one in self._to(engine)), default=0.0)

    def give_up(self, engine: KnownEngine, why: str) -> int:
        """Breaks off the engine's answers of which nothing was shown yet; to their readers, the
        connection was lost. Returns how many."""
        return sum(one.answer.give_up(why) for one in self._to(engine) if one.answer is not None)

    def _to(self, engine: KnownEngine) -> list[UpstreamConnection]:
        return [one for one, where in self._open.items() if where == engine.options.address]

    def _kept(self, place: _Place) -> UpstreamConnection | None:
        """An idle connection that may be used again."""
        idle = self._idle.get(place)
        while idle:
            connection, since = idle.pop()
            fresh = asyncio.get_running_loop().time() - since < _KEEP_ALIVE_S
            if fresh and connection.usable:
                return connection
            connection.abort()
        return None

    async def _connect(
        self, engine: KnownEngine, leg: LegKind, address: _Address, tls: ssl.SSLContext | None
    ) -> UpstreamConnection:
        loop = asyncio.get_running_loop()

        def made() -> UpstreamConnection:
            return UpstreamConnection(lambda it: self._free((address, tls), it), self._lost)

        while True:
            due = loop.time() + _CONNECT_S
            try:
                async with asyncio.timeout_at(due):
                    _, connection = await loop.create_connection(made, *address, ssl=tls)
            except TimeoutError as exc:
                if loop.time() - due > _CONNECT_S * _LATE:
                    continue
                text = f"no connection within {_CONNECT_S:g} s"
                raise LegFailed(engine, leg, "refused", text) from exc
            except OSError as exc:
                if isinstance(exc, ConnectionRefusedError):
                    self._nobody_listens(engine, address)
                raise LegFailed(engine, leg, "refused", f"{type(exc).__name__}: {exc}") from exc
            self._open[connection] = address
            return connection

    def _nobody_listens(self, engine: KnownEngine, address: _Address) -> None:
        if address == engine.options.address:
            engine.ends += 1
        for connection, where in self._open.items():
            if where == address and connection.answer is not None:
                connection.answer.left()

    def _lost(self, connection: UpstreamConnection) -> None:
        self._open.pop(connection, None)

    def _free(self, place: _Place, connection: UpstreamConnection) -> None:
        loop = asyncio.get_running_loop()
        self._idle.setdefault(place, []).append((connection, loop.time()))
        if self._sweep is None:
            self._sweep = loop.call_later(_KEEP_ALIVE_S, self._close_idle)

    def _close_idle(self) -> None:
        """Closes connections that were not used for long; an engine might not close them."""
        loop = asyncio.get_running_loop()
        self._sweep = None
        for place, idle in list(self._idle.items()):
            old = [one for one in idle if loop.time() - one[1] >= _KEEP_ALIVE_S]
            for connection, _ in old:
                connection.abort()
            self._idle[place] = idle[len(old) :]
            if not self._idle[place]:
                del self._idle[place]
        if self._idle:
            self._sweep = loop.call_later(_KEEP_ALIVE_S, self._close_idle)


@lru_cache(maxsize=4096)
def _address(host: str) -> _Address:
    """host: HOST:PORT."""
    parts = urlsplit(f"//{host}")
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port


def _head(
    method: str,
    target: str,
    host: str,
    headers: Mapping[str, str] | CIMultiDict[str],
    body: bytes | None,
) -> bytes:
    """Raises ValueError when a value would end its line."""
    lines = [f"{method} {target} HTTP/1.1", f"host: {host}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body is not None or method in _WITH_BODY:
        lines.append(f"content-length: {len(body or b'')}")
    text = "\r\n".join(lines)
    if text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1 or "\0" in text:
        raise ValueError("a header has a line break or a null character")
    return f"{text}\r\n\r\n".encode("utf-8", "surrogateescape")
