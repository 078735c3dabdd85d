"""A remote prefill as an observer of the graph sees it on the page."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page

from benchmarks.browser import find_chromium, open_page
from tests.lacking import lacking
from tests.vllm.asking import ask, prompt_ids
from tests.vllm.graph import Graph

pytestmark = pytest.mark.timeout(300)

PATIENCE_MS = 60_000


@pytest.fixture
def page() -> Iterator[Page]:
    if (program := find_chromium()) is None:
        lacking("no chromium is installed")
    with open_page(program) as page:
        page.set_default_timeout(PATIENCE_MS)
        yield page


def test_a_remote_prefill_shows_on_the_page(disagg: Graph, page: Page):
    troubles: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{disagg.url}/dashboard")
    page.wait_for_selector("#connection[data-state=live]")
    for worker in ("Frontend-0", "PrefillWorker-0", "VllmWorker-0"):
        page.wait_for_selector(f"#workers tr:has-text('{worker}') .good:text-is('ready')")
    page.wait_for_selector("#failed-links :text-is('no failed links')")
    assert page.locator("path.remote").get_attribute("d") in (None, "")

    ask(disagg.url, "completions", {"prompt": prompt_ids(1500, seed=501), "max_tokens": 2})

    page.wait_for_selector("#decisions tr.busy:has-text('remote'):has-text('long')")
    page.wait_for_selector("path.remote[d^=M]", state="attached")
    page.wait_for_selector("path.moved[d^=M]", state="attached")
    page.wait_for_selector("#moved:not(:text-is('0 B/s'))")
    page.wait_for_selector("#ttft:has-text('s')")
    assert troubles == []
    assert {url.removeprefix(disagg.url) for url in asked if not url.startswith("data:")} == {
        "/dashboard",
        "/dashboard/dashboard.css",
        "/dashboard/dashboard.js",
        "/dashboard/overview",
    }
