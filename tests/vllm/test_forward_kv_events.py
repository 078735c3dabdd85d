"""A Forwarder that follows a stock engine's KV events knows prompts that it has never sent."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.vllm.asking import prose
from tests.vllm.conftest import Stage
from tests.vllm.graph import Graph, eventually
from tests.vllm.stock import FORWARD, StockEngine

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("stock")]


@pytest.fixture(scope="module")
def followed(
    stage: Stage, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Graph, StockEngine]]:
    """A Forwarder and its decode engine, which publishes; prompts of more than 100 uncached tokens
    get a prefill leg."""
    stock = stage.stock()
    engines = (
        f'[{{url: "{stock.prefill.url}", role: prefill}},'
        f' {{url: "{stock.decode.url}", role: decode, {stock.kv_events}}}]'
    )
    options = (
        f"--Forwarder.engines={engines}",
        "--Forwarder.max-local-prefill-length=100",
        "--Forwarder.tokenize-timeout-s=10",
    )
    directory = tmp_path_factory.mktemp("kv-events")
    with Graph(directory, FORWARD, options, http="Forwarder") as graph:
        eventually(lambda: graph.health("Forwarder")["ok"], timeout_s=30, what="engines")
        yield graph, stock.decode


def answers(graph: Graph) -> tuple[float, float]:
    """With a prefill leg, and without one because the decode engine holds the prompt."""
    name = "dynamo_lite_forward_answers_total"
    return (
        graph.count("Forwarder", name, how="disaggregated"),
        graph.count("Forwarder", name, reason="cached"),
    )


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
def test_what_another_client_has_sent_is_known(followed: tuple[Graph, StockEngine], kind: str):
    graph, decode = followed
    text = prose(300, seed=len(kind))
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "temperature": 0}
    if kind == "completions":
        body["prompt"] = text
    else:
        body["messages"] = [{"role": "user", "content": text}]

    def ask(url: str) -> None:
        httpx.post(f"{url}/v1/{kind}", json=body, timeout=60).raise_for_status()

    def blocks() -> float:
        return graph.count("Forwarder", "dynamo_lite_forward_kv_blocks")

    eventually(
        lambda: graph.count("Forwarder", "dynamo_lite_forward_kv_engines") == 1,
        timeout_s=30,
        what="followed events",
    )
    before, known = answers(graph), blocks()
    ask(decode.url)
    eventually(lambda: blocks() > known, timeout_s=30, what="new blocks")
    ask(graph.url)
    assert answers(graph) == (before[0], before[1] + 1)
    assert graph.count("Forwarder", "dynamo_lite_forward_tokenized_total", result="failed") == 0


def test_what_nobody_has_sent_gets_a_prefill_leg(followed: tuple[Graph, StockEngine]):
    graph, _ = followed
    before = answers(graph)
    body = {"model": "tiny", "max_tokens": 4, "prompt": prose(300, seed=77)}
    httpx.post(f"{graph.url}/v1/completions", json=body, timeout=60).raise_for_status()
    assert answers(graph) == (before[0] + 1, before[1])
