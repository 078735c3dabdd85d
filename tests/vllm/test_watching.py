"""A remote prefill as an observer of the graph sees it: on the page, and by `top`."""

import signal
import subprocess
import sys
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


def prefill_remotely(graph: Graph, seed: int) -> None:
    """Sends a prompt that was not sent before."""
    ask(graph.url, "completions", {"prompt": prompt_ids(1500, seed), "max_tokens": 2})


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

    prefill_remotely(disagg, seed=501)

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


def test_a_remote_prefill_shows_in_top(disagg: Graph):
    command = [sys.executable, "-m", "dynamo_lite.cli.cli", "top", "--interval", "0.5"]
    command += ["--state-dir", str(disagg.state_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as top:
        assert top.stdout is not None
        lines = iter(top.stdout)
        next(line for line in lines if line.startswith("VllmWorker-0"))
        prefill_remotely(disagg, seed=502)
        # verdict, reason, per second, total
        next(line for line in map(str.split, lines) if _decides_remotely(line))
        next(line for line in lines if line.startswith("transfers") and " 0 B/s" not in line)
        top.send_signal(signal.SIGINT)
        for _ in lines:
            pass
        assert top.wait() == 0


def _decides_remotely(words: list[str]) -> bool:
    return words[:2] == ["remote", "long"] and float(words[2]) > 0
