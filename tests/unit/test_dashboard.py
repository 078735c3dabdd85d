"""The page `/dashboard` behind its real HTTP listener, with an observer that is made up."""

import asyncio
import contextlib
import re

import httpx
import msgspec
import pytest
from starlette.types import Receive, Scope, Send

from dynamo_lite.runtime.address import is_loopback
from dynamo_lite.runtime.listening import bind
from dynamo_lite.runtime.overview.model import Overview
from dynamo_lite.serve.services.frontend.dashboard.app import OVERVIEW, Dashboard
from dynamo_lite.serve.services.frontend.http import HttpServer, url_of
from dynamo_lite.serve.services.frontend.http_entry import OwnPages
from dynamo_lite.vllm.http_options import HttpOptions

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

PATIENCE_S = 20.0


class Counting:
    """Numbers the looks."""

    def __init__(self) -> None:
        self.looks = 0
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def look(self) -> Overview:
        self.looks += 1
        await self.may_end.wait()
        return Overview(at=float(self.looks), namespace="t", rate_s=1, latency_s=1)


class Page:
    """A listening dashboard. client: of its own machine."""

    def __init__(self, counting: Counting, url: str, client: httpx.AsyncClient):
        self.counting, self.url, self.client = counting, url, client

    async def seen(self) -> float:
        answer = await self.client.get(f"{self.url}{OVERVIEW}")
        assert answer.status_code == 200
        return msgspec.json.decode(answer.content, type=Overview).at


async def vllm_app(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        for _ in range(2):
            await send({"type": f"{(await receive())['type']}.complete"})
        return
    await send({"type": "http.response.start", "status": 418, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@contextlib.asynccontextmanager
async def serving(*, any_name: bool = False, period_s: float = 60.0):
    counting = Counting()
    sock = bind("127.0.0.1", 0)
    dashboard = Dashboard(
        counting,  # pyright: ignore[reportArgumentType]
        any_name=any_name,
        period_s=period_s,
    )
    server = HttpServer(OwnPages(vllm_app, dashboard.pages), sock, HttpOptions(access_log=False))
    await server.start()
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client:
            yield Page(counting, url_of(sock), client)
    finally:
        await server.stop(1.0)
        sock.close()


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
        assert page.counting.looks == 0


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/dashboard/", {}, 200),
        ("/dashboard/../secret", {}, 418),
        ("/dashboard/static/dashboard.js", {}, 418),
        ("/dashboards", {}, 418),
        ("/v1/models", {"host": "evil.example"}, 418),
        ("/dashboard", {"host": "evil.example"}, 421),
        ("/dashboard/overview", {"host": "evil.example:80"}, 421),
        ("/dashboard", {"host": "LocalHost:8000"}, 200),
        ("/dashboard", {"host": "[::1]:8000"}, 200),
        ("/dashboard/overview", {"sec-fetch-site": "cross-site"}, 403),
        ("/dashboard/overview", {"sec-fetch-site": "same-site"}, 403),
    ],
)
async def test_who_is_answered_what(path: str, headers: dict[str, str], status: int):
    async with serving() as page:
        answer = await page.client.get(f"{page.url}{path}", headers=headers)
        assert answer.status_code == status
        assert page.counting.looks == 0


async def test_a_page_that_was_turned_on_has_any_name():
    async with serving(any_name=True) as page:
        answer = await page.client.get(f"{page.url}/dashboard", headers={"host": "mine.example"})
        assert answer.status_code == 200
        assert (await page.client.post(f"{page.url}/dashboard")).status_code == 405


async def test_it_looks_while_there_is_a_viewer():
    async with serving(period_s=0.0) as page:
        assert [await page.seen() for _ in range(3)] == [1.0, 2.0, 3.0]
        answer = await page.client.get(f"{page.url}{OVERVIEW}")
        assert "access-control-allow-origin" not in answer.headers
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert answer.headers["cache-control"] == "no-store"


async def test_all_who_watch_share_one_look():
    async with serving() as page:
        page.counting.may_end.clear()
        viewers = [asyncio.create_task(page.seen()) for _ in range(5)]
        async with asyncio.timeout(PATIENCE_S):
            while not page.counting.looks:
                await asyncio.sleep(0.01)
        page.counting.may_end.set()
        assert await asyncio.gather(*viewers) == [1.0] * 5
        assert await page.seen() == 1.0


@pytest.mark.parametrize(
    ("host", "private"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("h", False)],
)
def test_loopback(host: str, private: bool):
    assert is_loopback(host) is private
