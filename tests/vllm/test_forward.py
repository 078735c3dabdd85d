"""A Forwarder in front of two stock vLLM engines with NixlConnector or NixlPushConnector."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.vllm.asking import ask, assert_same, client, prompt_ids, prose, tokens_of
from tests.vllm.conftest import Stage
from tests.vllm.graph import PlainServer
from tests.vllm.stock import Forwarded, forwarded
from tests.vllm.test_answers import CHATS, COMPLETIONS, GREEDY, streaming

pytestmark = pytest.mark.timeout(400)

#: Several sequences cannot be handed over.
ALONE = {"two choices", "several prompts", "echo"}


@pytest.fixture(scope="module", params=["nixl", pytest.param("nixl-push", marks=pytest.mark.heavy)])
def running(
    stage: Stage, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Forwarded]:
    stage.clear()
    with forwarded(tmp_path_factory.mktemp(request.param), request.param) as running:
        yield running


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
    running: Forwarded, reference: PlainServer, kind: str, name: str, stream: bool
):
    request = (CHATS if kind == "chat" else COMPLETIONS)[name] | streaming(stream)
    how = "alone" if name in ALONE else "disaggregated"
    before = running.answers(how)
    expected = ask(reference.url, kind, request)
    assert_same(ask(running.graph.url, kind, request), expected)
    assert running.answers(how) == before + 1


async def test_many_at_once(running: Forwarded, reference: PlainServer):
    requests: list[dict[str, Any]] = [
        {"prompt": prompt_ids(50 + 60 * n, seed=n), "max_tokens": 12} for n in range(16)
    ]
    before = running.answers("disaggregated")
    expected = await tokens_of(reference.url, requests)
    assert await tokens_of(running.graph.url, requests) == expected
    assert running.answers("disaggregated") == before + len(requests)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_responses(running: Forwarded, reference: PlainServer, stream: bool):
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

    before = running.answers("disaggregated")
    assert text(running.graph.url) == text(reference.url) != ""
    assert running.answers("disaggregated") == before + 1


def test_without_its_prefill_engine_it_goes_on(running: Forwarded, reference: PlainServer):
    """The last one: it leaves the decode engine alone."""
    running.prefill.kill()
    for seed in range(4):
        request: dict[str, Any] = {"prompt": prose(400, seed=100 + seed), **GREEDY}
        expected = ask(reference.url, "completions", request)
        assert_same(ask(running.graph.url, "completions", request), expected)
    # Blocks that it should have given are computed here instead.
    assert running.answers("alone") >= 4
