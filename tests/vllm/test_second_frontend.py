"""A second Frontend joins the shared graph: it parses reasoning."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.vllm.asking import ask, assert_same, prose
from tests.vllm.graph import PAIR_OPTIONS, Graph, PlainServer, together
from tests.vllm.models import model_of

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

PARSER = "deepseek_r1"
#: `</think>`, made likely enough to occur within an answer.
END_OF_REASONING = {"511": 4.0}


@pytest.fixture(scope="module")
def both(stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Graph, PlainServer]]:
    """The Frontend, and vLLM's own server with the same parser and the same tokeniser."""
    pair: Graph = stage.shared(PAIR_OPTIONS)
    tokenizer = str(model_of("thinking"))
    options = [
        *pair.servers,
        f"--Frontend.reasoning-parser={PARSER}",
        f"--Frontend.tokenizer={tokenizer}",
    ]
    directory = tmp_path_factory.mktemp("second")
    frontend = Graph(directory / "frontend", options=options, service="Frontend")
    plain = PlainServer(
        directory / "plain", flags={"tokenizer": tokenizer, "reasoning-parser": PARSER}
    )
    plain.start()
    try:
        with together([frontend]):
            plain.wait_until(plain.is_ready, 180)
            yield frontend, plain
    finally:
        plain.end()


def chat(number: int, words: int, **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": prose(words, seed=number)}],
        "temperature": 0,
        "max_tokens": 40,
        "logit_bias": END_OF_REASONING,
        **more,
    }


#: The long ones are prefilled remotely. Where the reasoning ends amid a character, vLLM's parser
#: streams the rest of it only if that token and the end of the reasoning come in one delta, which
#: is a matter of time: so none of these ends so.
CHATS = [chat(seed, 9) for seed in (1400, 1401, 1403, 1407)] + [
    chat(seed, 400) for seed in (1404, 1405)
]


def test_reasoning_is_split_off_as_by_vllms_own_server(
    pair: Graph, both: tuple[Graph, PlainServer]
):
    frontend, plain = both
    split = 0
    for request in CHATS:
        expected = ask(plain.url, "chat", request)
        assert_same(ask(frontend.url, "chat", request), expected)
        message = expected["choices"][0]["message"]
        assert not message["reasoning"].endswith("\ufffd")
        streamed = request | {"stream": True, "stream_options": {"include_usage": True}}
        expected = ask(plain.url, "chat", streamed)
        assert_same(ask(frontend.url, "chat", streamed), expected)
        (choice,) = expected["choices"]
        split += bool(message["content"] and message["reasoning"])
        split += bool(choice["text"] and choice["reasoning"])
    assert split >= 4, "some answers have both"
    hidden = CHATS[0] | {"extra_body": {"include_reasoning": False}}
    assert_same(ask(frontend.url, "chat", hidden), ask(plain.url, "chat", hidden))
