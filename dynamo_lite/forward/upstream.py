"""HTTP requests to engines, over connections that are kept and used again.

With aiohttp's client a request takes twice as many instructions (docs/forwarding.md#cost).
"""

import asyncio
import ssl
from collections.abc import Mapping
from contextlib import closing
from functools import partial

from multidict import CIMultiDict

from dynamo_lite.forward.connection import EngineAnswer, UpstreamConnection
from dynamo_lite.forward.engines import KnownEngine
from dynamo_lite.forward.failures import LegFailed, LegKind
from dynamo_lite.runtime.address import host_port

_CONNECT_S = 2.0
#: A connect timeout that comes so much too late says that this process has stood still, and nothing
#: about the engine: it is tried again.
_LATE_S = 0.2
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})

_Address = tuple[str, int]
#: The key includes how the certificate was checked, so that a connection is not reused where a
#: stricter check applies.
_Place = tuple[_Address, ssl.SSLContext | None]


class Upstream:
    """Its owner closes it. idle_s: longest time without any byte of an answer."""

    def __init__(self, idle_s: float):
        self._idle_s = idle_s
        self._open: set[UpstreamConnection] = set()
        #: Idle connections; the last one is used first.
        self._idle: dict[_Place, list[UpstreamConnection]] = {}

    async def aclose(self) -> None:
        for connection in self._open:
            connection.abort()
        await asyncio.sleep(0)  # the loop closes them now

    async def send(
        self,
        engine: KnownEngine,
        leg: LegKind,
        method: str,
        path: str,
        headers: Mapping[str, str] | CIMultiDict[str] | None = None,
        body: bytes | None = None,
        *,
        at: _Address | None = None,
    ) -> EngineAnswer:
        """The answer, of which nothing has come yet. path: with its query, encoded. at: the address
        of another server of the engine, which speaks plain HTTP.

        Raises LegFailed. The caller closes the answer: `close` drops the connection if the answer
        has not ended, and the engine then aborts the request.
        """
        place, host = (engine.address, engine.tls), engine.name
        if at is not None:
            place, host = (at, None), host_port(*at)
        try:
            head = _head(method, path, host, headers or {}, body)
        except ValueError as exc:
            raise LegFailed(engine, leg, "broken", str(exc)) from exc
        # A check shall see whether the engine still accepts connections.
        kept = None if leg == "check" else self._kept(place)
        connection = kept or await self._connect(engine, leg, place)
        answer = EngineAnswer(connection, engine, leg, self._idle_s, bodyless=method == "HEAD")
        connection.ask(answer, (head, body) if body else (head,))
        return answer

    async def fetch(
        self, engine: KnownEngine, path: str, *, within_s: float, at: _Address | None = None
    ) -> tuple[int, bytes]:
        """A small page. Raises LegFailed."""
        try:
            async with asyncio.timeout(within_s):
                close = {"connection": "close"}
                with closing(await self.send(engine, "check", "GET", path, close, at=at)) as answer:
                    page = await answer.read()
                    return answer.status, page
        except TimeoutError as exc:
            text = f"no answer within {within_s:g} s"
            raise LegFailed(engine, "check", "timeout", text) from exc

    def _kept(self, place: _Place) -> UpstreamConnection | None:
        """An idle connection that may be used again."""
        idle = self._idle.get(place, [])
        while idle:
            connection = idle.pop()
            if connection.usable:
                return connection
            connection.abort()
        return None

    async def _connect(
        self, engine: KnownEngine, leg: LegKind, place: _Place
    ) -> UpstreamConnection:
        address, tls = place
        on_free, on_lost = partial(self._free, place), partial(self._lost, place)
        made = partial(UpstreamConnection, on_free, on_lost)
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _CONNECT_S
            try:
                async with asyncio.timeout_at(due):
                    _, connection = await loop.create_connection(made, *address, ssl=tls)
            except TimeoutError as exc:
                if loop.time() - due > _LATE_S:
                    continue
                text = f"no connection within {_CONNECT_S:g} s"
                raise LegFailed(engine, leg, "refused", text) from exc
            except OSError as exc:
                # Other ports of an engine may refuse while it works.
                if isinstance(exc, ConnectionRefusedError) and address == engine.address:
                    engine.ended("it refuses connections", refuses=True)
                raise LegFailed(engine, leg, "refused", f"{type(exc).__name__}: {exc}") from exc
            self._open.add(connection)
            return connection

    def _free(self, place: _Place, connection: UpstreamConnection) -> None:
        idle = self._idle.setdefault(place, [])
        while idle and not idle[0].usable:  # not every engine closes them
            idle.pop(0).abort()
        idle.append(connection)

    def _lost(self, place: _Place, connection: UpstreamConnection) -> None:
        self._open.discard(connection)
        idle = self._idle.get(place, [])
        if connection in idle:
            idle.remove(connection)
        if not idle:
            self._idle.pop(place, None)


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
