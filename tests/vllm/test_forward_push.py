"""A Forwarder in front of two stock vLLM engines with NixlPushConnector."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.vllm.asking import ask, prompt_ids, tokens_of
from tests.vllm.conftest import Stage
from tests.vllm.graph import PlainServer, eventually
from tests.vllm.stock import Forwarded, forwarded
from tests.vllm.test_answers import CHATS, COMPLETIONS, assert_same, streaming

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def push(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forwarded]:
    stage.clear()
    directory = tmp_path_factory.mktemp("push")
    with forwarded(directory, protocol="nixl-push") as running:
        eventually(
            lambda: running.graph.health("Forwarder")["ok"], timeout_s=30, what="healthy engines"
        )
        yield running


def answers(running: Forwarded, how: str = "disaggregated") -> float:
    return running.graph.count("Forwarder", "dynamo_lite_forward_answers_total", how=how)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("chat", "long"), ("chat", "logprobs"), ("completions", "tokens"), ("completions", "short")],
)
def test_answers_are_those_of_one_plain_engine(
    push: Forwarded, reference: PlainServer, kind: str, name: str, stream: bool
):
    request = (CHATS if kind == "chat" else COMPLETIONS)[name] | streaming(stream)
    before = answers(push)
    expected = ask(reference.url, kind, request)
    assert_same(ask(push.graph.url, kind, request), expected)
    assert answers(push) == before + 1


async def test_many_at_once(push: Forwarded, reference: PlainServer):
    requests: list[dict[str, Any]] = [
        {"prompt": prompt_ids(50 + 60 * n, seed=n), "max_tokens": 12} for n in range(16)
    ]
    before = answers(push)
    expected = await tokens_of(reference.url, requests)
    assert await tokens_of(push.graph.url, requests) == expected
    assert answers(push) == before + 16
    assert answers(push, "alone") == 0
