"""A Forwarder in front of two stock vLLM engines with NixlConnector."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.vllm.asking import ask, client, prose
from tests.vllm.conftest import Stage
from tests.vllm.graph import PlainServer, eventually
from tests.vllm.stock import Forwarded, forwarding
from tests.vllm.test_answers import CHATS, COMPLETIONS, GREEDY, assert_same, streaming

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("stock")]

#: Several sequences cannot be handed over.
ALONE = {"two choices", "several prompts", "echo"}


@pytest.fixture(scope="module")
def pull(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forwarded]:
    stock = stage.stock()
    directory = tmp_path_factory.mktemp("forward")
    with forwarding(directory, [stock.prefill], [stock.decode]) as running:
        # Ready is the Forwarder's port; the engines are found healthy a moment later.
        eventually(
            lambda: running.graph.health("Forwarder")["ok"], timeout_s=30, what="healthy engines"
        )
        yield running


def answers(running: Forwarded, how: str) -> float:
    return running.graph.count("Forwarder", "dynamo_lite_forward_answers_total", how=how)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("chat", name) for name in ("short", "long", "two choices", "drawn", "logprobs")),
        *(("chat", name) for name in ("schema", "any tool")),
        *(("completions", name) for name in COMPLETIONS),
    ],
)
def test_answers_are_those_of_one_plain_engine(
    pull: Forwarded, reference: PlainServer, kind: str, name: str, stream: bool
):
    request = (CHATS if kind == "chat" else COMPLETIONS)[name] | streaming(stream)
    how = "alone" if name in ALONE else "disaggregated"
    before = answers(pull, how)
    expected = ask(reference.url, kind, request)
    assert_same(ask(pull.graph.url, kind, request), expected)
    assert answers(pull, how) == before + 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_responses(pull: Forwarded, reference: PlainServer, stream: bool):
    def text(url: str) -> str:
        with client(url) as api:
            asked: dict[str, Any] = {"input": prose(300, seed=8), "temperature": 0}
            asked |= {"model": "tiny", "max_output_tokens": 12}
            if not stream:
                return api.responses.create(**asked).output_text
            with api.responses.create(**asked, stream=True) as events:
                return "".join(
                    event.delta for event in events if event.type == "response.output_text.delta"
                )

    before = answers(pull, "disaggregated")
    assert text(pull.graph.url) == text(reference.url) != ""
    assert answers(pull, "disaggregated") == before + 1


@pytest.mark.takes_workers
def test_without_its_prefill_engine_it_goes_on(pull: Forwarded, reference: PlainServer):
    pull.prefill[0].kill()
    for seed in range(4):
        request: dict[str, Any] = {"prompt": prose(400, seed=100 + seed), **GREEDY}
        expected = ask(reference.url, "completions", request)
        assert_same(ask(pull.graph.url, "completions", request), expected)
    # Blocks that it should have given are computed here instead.
    assert answers(pull, "alone") >= 4
