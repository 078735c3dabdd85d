"""A second Frontend joins the shared graph: it parses reasoning, and tries idle workers."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.vllm.asking import ask, assert_same, prose
from tests.vllm.graph import PAIR_OPTIONS, Graph, PlainServer, together
from tests.vllm.models import model_of
from tests.vllm.test_unresponsive import responsive, stopped, until

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

CANARIES = "dynamo_lite_canaries_total"
PARSER = "deepseek_r1"
#: `</think>`, made likely enough to occur within an answer.
END_OF_REASONING = {"511": 4.0}
INTERVAL_S, TIMEOUT_S = 0.5, 1.0
#: So often is looked who is due, and so often is tried again who has failed.
LOOK_S, RETRY_S = 1.0, 2.0
#: For the Frontend's own work, on a machine that others use.
SLACK_S = 1.0


@pytest.fixture(scope="module")
def both(stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Graph, PlainServer]]:
    """The Frontend, and vLLM's own server with the same parser and the same tokeniser."""
    pair: Graph = stage.shared(PAIR_OPTIONS)
    tokenizer = str(model_of("thinking"))
    options = [
        *pair.servers,
        f"--Frontend.reasoning-parser={PARSER}",
        f"--Frontend.tokenizer={tokenizer}",
        f"--Frontend.canary.interval-s={INTERVAL_S}",
        f"--Frontend.canary.timeout-s={TIMEOUT_S}",
        "--Frontend.canary.max-per-minute=600",
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


async def test_a_canary_finds_an_idle_engine_that_stands_still(
    pair: Graph, both: tuple[Graph, PlainServer]
):
    frontend, _ = both

    def tried(outcome: str) -> float:
        return frontend.count("Frontend", CANARIES, outcome=outcome)

    good, failed = tried("ok"), tried("failed")
    await until(lambda: tried("ok") >= good + 2, 10, "idle workers are tried")
    assert responsive(frontend) == 2
    worker = pair.process("VllmWorker", 0)
    began = time.monotonic()
    async with stopped(pair.engine_pid("VllmWorker", 0)):
        await until(lambda: responsive(frontend) == 1, 10, "the worker is out of rotation")
        took_s = time.monotonic() - began
        assert took_s < INTERVAL_S + LOOK_S + 2 * TIMEOUT_S + SLACK_S
        assert tried("failed") > failed
    said = f"worker {worker.lease} is unhealthy: a canary failed: timeout after {TIMEOUT_S:g} s"
    assert said in frontend.log_of("Frontend")
    good = tried("ok")
    await until(lambda: responsive(frontend) == 2, RETRY_S + 10, "the worker is back")
    assert tried("ok") > good
    await until(lambda: responsive(pair) == 2, 10, "for the first Frontend, too")
    await pair.settled()
