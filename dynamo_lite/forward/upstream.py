"""HTTP requests to engines: one client session for all of them.

aiohttp, because vLLM brings it, its parsers for both sides are in C, its connections are pooled
and kept alive, and its reader stops reading from an engine while the client does not read. httpx,
which the toy proxies use, takes several times the CPU for each streamed chunk; a client on
httptools would be faster still, but would be a second pool, timeout and backpressure of our own.
"""

import asyncio
from collections.abc import Mapping
from typing import Literal, Self

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from dynamo_lite.forward.engines import Engine
from dynamo_lite.protocol.errors import DynamoLiteError

#: Below uvicorn's default of 5 s: a connection must not be used while the engine closes it.
_KEEP_ALIVE_S = 4.0
#: Of the head of an engine's answer.
_MAX_FIELD_BYTES = 64 << 10
#: What aiohttp would add by itself.
_NO_AUTO_HEADERS = ("accept", "accept-encoding", "user-agent", "content-type")

Kind = Literal["refused", "timeout", "broken"]


class LegFailed(DynamoLiteError):
    """An engine did not answer. kind: `refused`: no connection; `broken`: it was lost."""

    def __init__(self, engine: str, kind: Kind, detail: str):
        super().__init__(f"engine {engine}: {kind}: {detail}")
        self.engine = engine
        self.kind: Kind = kind
        self.detail = detail


class Upstream:
    """Async context manager. idle_s: longest time without any byte of an answer."""

    def __init__(self, *, connect_s: float, idle_s: float):
        self._connect_s, self._idle_s = connect_s, idle_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=self._connect_s, sock_read=self._idle_s
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_NO_AUTO_HEADERS,
            # An answer passes as the engine has encoded it.
            auto_decompress=False,
            trust_env=False,
            max_field_size=_MAX_FIELD_BYTES,
            max_line_size=_MAX_FIELD_BYTES,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def open(
        self,
        engine: Engine,
        method: str,
        path: str,
        headers: Mapping[str, str] | CIMultiDict[str] | None = None,
        body: bytes | None = None,
    ) -> aiohttp.ClientResponse:
        """The answer's head; its body is still to be read. path: with its query, encoded.

        Raises LegFailed. The caller closes the answer: `close` drops the connection, and the
        engine then aborts the request.
        """
        return await self.open_url(f"{engine.base}{path}", engine, method, headers, body)

    async def open_url(
        self,
        url: str,
        engine: Engine,
        method: str,
        headers: Mapping[str, str] | CIMultiDict[str] | None = None,
        body: bytes | None = None,
    ) -> aiohttp.ClientResponse:
        assert self._session is not None
        try:
            return await self._session.request(
                method,
                URL(url, encoded=True),
                headers=headers,
                data=body,
                allow_redirects=False,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as exc:
            raise LegFailed(engine.name, "refused", _detail(exc)) from exc
        except TimeoutError as exc:
            raise LegFailed(engine.name, "timeout", f"no answer for {self._idle_s:g} s") from exc
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            raise LegFailed(engine.name, "broken", _detail(exc)) from exc

    async def read(self, engine: Engine, response: aiohttp.ClientResponse) -> bytes:
        """The whole body. Raises LegFailed."""
        try:
            return await response.read()
        except TimeoutError as exc:
            raise LegFailed(engine.name, "timeout", f"no byte for {self._idle_s:g} s") from exc
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            raise LegFailed(engine.name, "broken", _detail(exc)) from exc

    async def read_some(self, engine: Engine, response: aiohttp.ClientResponse) -> bytes:
        """What has come; empty at the end. Raises LegFailed."""
        try:
            return await response.content.readany()
        except TimeoutError as exc:
            raise LegFailed(engine.name, "timeout", f"no byte for {self._idle_s:g} s") from exc
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            raise LegFailed(engine.name, "broken", _detail(exc)) from exc

    async def fetch(self, engine: Engine, url: str, *, within_s: float) -> tuple[int, bytes]:
        """A small page. Raises LegFailed."""
        try:
            async with asyncio.timeout(within_s):
                response = await self.open_url(url, engine, "GET")
                try:
                    return response.status, await self.read(engine, response)
                finally:
                    response.release()
        except TimeoutError as exc:
            raise LegFailed(engine.name, "timeout", f"no answer within {within_s:g} s") from exc


def _detail(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
