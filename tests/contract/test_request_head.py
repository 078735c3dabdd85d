"""Connections on which no whole request head comes, at each of the HTTP servers."""

import asyncio
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from dynamo_lite.runtime import request_head
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.listening import bind
from dynamo_lite.runtime.process.status import StatusServer
from dynamo_lite.serve.services.frontend.http import HttpServer
from dynamo_lite.vllm.http_options import HttpOptions, TlsOptions
from tests.certificate_folders import graph_folder, of
from tests.external import Certificates
from tests.forwarding import rig

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

REQUEST = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@asynccontextmanager
async def frontend(
    https: Certificates | None = None, on_drop: OnDrop = uncounted
) -> AsyncIterator[int]:
    async def ok(_: Any) -> PlainTextResponse:
        return PlainTextResponse("ok")

    with bind("127.0.0.1", 0) as sock:
        certificate, key = map(str, https.files()) if https else ("", "")
        tls = TlsOptions(certfile=certificate, keyfile=key) if https else None
        app = Starlette(routes=[Route("/health", ok)])
        server = HttpServer(app, sock, HttpOptions(tls=tls), on_drop=on_drop)
        await server.start()
        try:
            yield sock.getsockname()[1]
        finally:
            await server.stop(0.0)


@asynccontextmanager
async def status(
    https: Certificates | None = None, on_drop: OnDrop = uncounted
) -> AsyncIterator[int]:
    own = of(graph_folder(https.folder / "graph"), "Router") if https else None
    facts = {"ok": True}
    async with StatusServer(
        lambda: facts, CollectorRegistry(), on_drop=on_drop, certificates=own
    ) as server:
        yield int(server.url.rpartition(":")[2])


@asynccontextmanager
async def forwarder(
    https: Certificates | None = None, on_drop: OnDrop = uncounted
) -> AsyncIterator[int]:
    ca_file = str(https.folder / "ca.pem") if https else None
    async with rig(https=https, ca_file=ca_file, on_drop=on_drop) as r:
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


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("opened", [frontend, status, forwarder])
async def test_connections_without_a_head_are_bounded_and_keep_no_client_out(
    monkeypatch: pytest.MonkeyPatch, certificates: Certificates, opened: Any, tls: bool
):
    """With TLS they are in their handshakes."""
    most = 16
    monkeypatch.setattr(request_head, "MAX_PENDING", most)
    https = certificates if tls else None
    dropped: Counter[str] = Counter()
    async with opened(https, lambda where: dropped.update([where])) as port, asyncio.timeout(10):
        silent = [
            await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
            for _ in range(3 * most)
        ]
        for reader, _ in silent[: 2 * most]:
            await until_closed(reader)
        trust = ssl.create_default_context(cafile=certificates.folder / "ca.pem") if tls else None
        if trust is not None and opened is status:
            trust.load_verify_locations(certificates.folder / "graph" / "ca.pem")
        own = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
        own[1].write(REQUEST)
        await own[0].readuntil(b"HTTP/1.1 200")
        assert dropped.total() in (2 * most, 2 * most + 1)  # and one for the client's place
        assert not any(reader.at_eof() for reader, _ in silent[2 * most + 1 :])
        for _, writer in (own, *silent):
            writer.close()


async def until_closed(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        await reader.read()
