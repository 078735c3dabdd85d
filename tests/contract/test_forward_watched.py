"""What `/dashboard` shows of a graph that has only Forwarders and engines that have joined."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from benchmarks.browser import find_chromium, open_page
from dynamo_lite.runtime.listening import bind
from dynamo_lite.runtime.overview.observer import Observer
from dynamo_lite.serve.services.frontend.dashboard.app import Dashboard
from dynamo_lite.serve.services.frontend.http import HttpServer, url_of
from dynamo_lite.vllm.http_options import HttpOptions
from tests.joining import Cluster, Running
from tests.lacking import lacking
from tests.unit.test_dashboard import vllm_app

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

PAGE_MS = 60_000


async def started(c: Cluster) -> Running:
    """A Forwarder with a prefill engine that it lists, and a decode engine that has joined."""
    listed, joined = await c.engine("prefill"), await c.engine("decode")
    joined.load = (3, 4)
    forwarder = await c.forwarder(engines=[{"url": listed.url, "role": "prefill"}], discover=True)
    await c.join(joined)
    await c.counts(forwarder, 1, 1)
    return forwarder


@contextlib.asynccontextmanager
async def served(c: Cluster) -> AsyncIterator[str]:
    """The URL of the page, as a Frontend serves it."""
    with bind("127.0.0.1", 0) as sock:
        async with Observer(c.store, c.namespace) as observer:
            dashboard = Dashboard(vllm_app, observer, any_name=False)
            server = HttpServer(dashboard, sock, HttpOptions(access_log=False))
            await server.start()
            try:
                yield f"{url_of(sock)}/dashboard"
            finally:
                await server.stop(1.0)


def read_page(program: str, url: str) -> tuple[str, list[str]]:
    """What is under the number of requests, and what the browser complained of."""
    troubles: list[str] = []
    with open_page(program) as page:
        page.set_default_timeout(PAGE_MS)
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.goto(url)
        for worker in ("Forwarder-0", "DecodeEngine-0"):
            page.wait_for_selector(f"#workers tr:has-text('{worker}') .good:text-is('ready')")
        page.wait_for_selector("#decisions tr:has-text('disaggregated')")
        return page.inner_text("#in-flight-more"), troubles


@pytest.mark.timeout(240)
async def test_the_page_shows_them(c: Cluster):
    if (program := find_chromium()) is None:
        lacking("no chromium is installed")
    forwarder = await started(c)
    await c.ask(forwarder)
    async with served(c) as url:
        engines, troubles = await asyncio.to_thread(read_page, program, url)
    assert engines == "1 of 1 prefill engines, 1 of 1 decode engines"
    assert troubles == []
