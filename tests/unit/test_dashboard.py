"""The page `/dashboard` behind its real HTTP listener, with an observer that is made up."""

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from dynamo_lite.overview.model import Overview
from dynamo_lite.protocol.errors import StoreUnavailable
from dynamo_lite.runtime.address import is_loopback
from dynamo_lite.runtime.listening import bind
from dynamo_lite.services.frontend.dashboard.app import Dashboard
from dynamo_lite.services.frontend.dashboard.viewers import Viewers
from dynamo_lite.services.frontend.http import HttpServer, url_of
from dynamo_lite.vllm.http_options import HttpOptions

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

PATIENCE_S = 20.0


class Counting:
    """Numbers the looks."""

    def __init__(self) -> None:
        self.opened = self.closed = self.looks = 0
        self.broken = False
        self.size = 0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator["Counting"]:
        self.opened += 1
        try:
            if self.broken:
                raise StoreUnavailable("it is away")
            yield self
        finally:
            self.closed += 1

    async def look(self) -> Overview:
        self.looks += 1
        trouble = ["x" * self.size] if self.size else []
        return Overview(at=float(self.looks), namespace="t", rate_s=1, latency_s=1, trouble=trouble)


class Page:
    """A listening dashboard. client: of its own machine."""

    def __init__(self, counting: Counting, viewers: Viewers, url: str, client: httpx.AsyncClient):
        self.counting, self.viewers, self.url, self.client = counting, viewers, url, client

    @contextlib.asynccontextmanager
    async def events(self) -> AsyncIterator[AsyncIterator[str]]:
        async with self.client.stream("GET", f"{self.url}/dashboard/events") as answer:
            assert answer.status_code == 200
            yield answer.aiter_lines()


async def vllm_app(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        for _ in range(2):
            await send({"type": f"{(await receive())['type']}.complete"})
        return
    await send({"type": "http.response.start", "status": 418, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@contextlib.asynccontextmanager
async def serving(*, any_name: bool = False, stream_s: float = 60.0, **how: Any):
    counting = Counting()
    viewers = Viewers(counting.open, **{"most": 2, "period_s": 0.02, "linger_s": 0.0, **how})
    sock = bind("127.0.0.1", 0)
    dashboard = Dashboard(
        vllm_app,
        viewers,
        lambda scope: server.disconnect(scope),
        any_name=any_name,
        stream_s=stream_s,
        send_s=0.3,
    )
    server = HttpServer(dashboard, sock, HttpOptions(access_log=False))
    await server.start()
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client:
            yield Page(counting, viewers, url_of(sock), client)
    finally:
        await viewers.close()
        await server.stop(1.0)
        sock.close()


async def until(condition: Any, what: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)
    assert condition(), what


async def looks_of(lines: AsyncIterator[str], number: int) -> list[float]:
    found: list[float] = []
    async for line in lines:
        if line:
            found.append(json.loads(line.removeprefix("data: "))["at"])
        if len(found) == number:
            break
    return found


async def test_the_page_and_its_files_stand_alone():
    async with serving() as page:
        html = (await page.client.get(f"{page.url}/dashboard")).text
        named = re.findall(r'(?:src|href)="([^"]+)"', html)
        assert sorted(named) == ["/dashboard/dashboard.css", "/dashboard/dashboard.js", "data:,"]
        for path in ("/dashboard", *named):
            if path.startswith("data:"):
                continue
            answer = await page.client.get(f"{page.url}{path}")
            assert answer.status_code == 200
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", answer.text)
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert "unsafe" not in answer.headers["content-security-policy"]
            assert "access-control-allow-origin" not in answer.headers
        assert page.counting.opened == 0


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/dashboard/", {}, 200),
        ("/dashboard/../secret", {}, 418),
        ("/dashboard/static/dashboard.js", {}, 404),
        ("/dashboards", {}, 418),
        ("/v1/models", {"host": "evil.example"}, 418),
        ("/dashboard", {"host": "evil.example"}, 421),
        ("/dashboard/events", {"host": "evil.example:80"}, 421),
        ("/dashboard", {"host": "LocalHost:8000"}, 200),
        ("/dashboard", {"host": "[::1]:8000"}, 200),
        ("/dashboard/events", {"sec-fetch-site": "cross-site"}, 403),
        ("/dashboard/events", {"sec-fetch-site": "same-site"}, 403),
    ],
)
async def test_who_is_answered_what(path: str, headers: dict[str, str], status: int):
    async with serving() as page:
        answer = await page.client.get(f"{page.url}{path}", headers=headers)
        assert answer.status_code == status
        assert page.counting.opened == 0


async def test_a_page_that_was_turned_on_has_any_name():
    async with serving(any_name=True) as page:
        answer = await page.client.get(f"{page.url}/dashboard", headers={"host": "mine.example"})
        assert answer.status_code == 200
        assert (await page.client.post(f"{page.url}/dashboard")).status_code == 405


async def test_it_looks_only_while_somebody_does():
    async with serving() as page:
        async with page.events() as lines:
            assert await looks_of(lines, 3) == [1.0, 2.0, 3.0]
            async with page.events() as others:
                assert (await looks_of(others, 2))[0] >= 3.0
                assert page.counting.opened == 1
        await until(lambda: page.counting.closed == 1, "nobody looks any more")
        assert page.viewers.count == 0 and not page.viewers.looking
        async with page.events() as lines:
            await looks_of(lines, 1)
        assert page.counting.opened == 2


async def test_who_comes_back_soon_finds_it_looking():
    async with serving(linger_s=60.0) as page:
        async with page.events() as lines:
            await looks_of(lines, 1)
        await until(lambda: page.viewers.count == 0, "the viewer has left")
        async with page.events() as lines:
            await looks_of(lines, 2)
        assert (page.counting.opened, page.counting.closed) == (1, 0)


async def test_viewers_are_bounded():
    async with serving() as page:
        async with page.events() as one, page.events() as two:
            await looks_of(one, 1)
            await looks_of(two, 1)
            answer = await page.client.get(f"{page.url}/dashboard/events")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
        await until(lambda: page.viewers.count == 0, "both have left")
        async with page.events() as lines:
            await looks_of(lines, 1)


async def test_who_reads_nothing_is_hung_up_on(caplog: pytest.LogCaptureFixture):
    async with serving(period_s=0.001) as page:
        page.counting.size = 200_000
        port = int(page.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as idle:
            idle.sendall(b"GET /dashboard/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await until(lambda: page.counting.opened == 1, "it looks")
            await until(lambda: page.viewers.count == 0, "it is let go")
            idle.settimeout(PATIENCE_S)
            await asyncio.to_thread(_read_to_the_end, idle)
        assert not caplog.records


def _read_to_the_end(client: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        while client.recv(1 << 20):
            pass


async def test_a_stream_ends_in_order_after_its_time():
    async with serving(stream_s=0.2) as page:
        async with page.events() as lines:
            assert [line async for line in lines]
        await until(lambda: page.viewers.count == 0, "the stream is over")


async def test_a_stream_that_fails_is_broken_off_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async def frames() -> AsyncIterator[bytes]:
        yield b"{}"
        raise RuntimeError("no more frames")

    async with serving() as page:
        monkeypatch.setattr(page.viewers, "frames", frames)
        with pytest.raises(httpx.RemoteProtocolError):
            async with page.events() as lines:
                assert [line async for line in lines]
        await until(lambda: page.viewers.count == 0, "the stream is over")
    assert "no more frames" in caplog.text


async def test_closing_ends_the_streams():
    async with serving() as page, page.events() as lines:
        await looks_of(lines, 1)
        await page.viewers.close()
        assert not [line async for line in lines if line]
        answer = await page.client.get(f"{page.url}/dashboard/events")
        assert answer.status_code == 503


async def test_a_store_that_is_away_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    async with serving(retry_s=0.01) as page, page.events() as lines:
        await looks_of(lines, 1)
        page.counting.broken = True
        monkeypatch.setattr(page.counting, "look", page.counting.open().__aenter__)
        await until(lambda: page.counting.opened >= 4, "it is tried again and again")
        monkeypatch.undo()
        page.counting.broken = False
        await looks_of(lines, 1)


@pytest.mark.parametrize(
    ("host", "private"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("h", False)],
)
def test_loopback(host: str, private: bool):
    assert is_loopback(host) is private
