"""A lone Frontend with the Rust edge joins the shared graph: remote prefills, first tokens from the
prefill worker, and refusals."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.vllm.asking import assert_same, prompt_ids
from tests.vllm.graph import Graph, PlainServer, eventually, together
from tests.vllm.test_answers import CHATS, COMPLETIONS
from tests.vllm.test_first_token import DIFFERENT, arrivals, arrived, handed_over
from tests.vllm.test_rust_edge import BINARY, NEEDS_BINARY, ask

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("disagg"), NEEDS_BINARY]


@pytest.fixture(scope="module")
def rust(stage: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graph]:
    options = [*stage.disagg().servers, "--Frontend.edge=rust", f"--Frontend.edge-binary={BINARY}"]
    directory = tmp_path_factory.mktemp("rust-edge")
    frontend = Graph(directory, options=options, service="Frontend")
    with together([frontend]):
        yield frontend


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_answers_begin_with_the_prefill_workers_token(
    disagg: Graph, rust: Graph, reference: PlainServer, stream: bool
):
    since, committed = arrivals(disagg), handed_over(disagg)
    different = disagg.count("VllmWorker", DIFFERENT)
    for number, tokens in enumerate((700, 1601)):
        request = {
            "prompt": prompt_ids(tokens, seed=950 + number + 10 * stream),
            "temperature": 0,
            "max_tokens": 24,
            "ignore_eos": True,
        }
        got = ask(rust, "completions", request, stream=stream)
        assert len(got["tokens"]) == 24 and got["choices"][0]["text"]
        assert_same(got, ask(reference, "completions", request, stream=stream))
    eventually(lambda: committed() == 2, timeout_s=5, what="both prompts are handed over")
    # The decode engine's token may come first now and then.
    assert arrived(since, 2)["sent"] >= 1
    assert disagg.count("VllmWorker", DIFFERENT) == different


#: Several choices and several prompts are a 400; a tool needs a parser (docs/edge.md).
NOT_ANSWERED = {"two choices", "several prompts", "any tool", "this tool"}
ANSWERED = [
    (kind, name)
    for kind, requests in (("chat", CHATS), ("completions", COMPLETIONS))
    for name in requests
    if name not in NOT_ANSWERED
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("kind", "name"), ANSWERED)
def test_answers_are_those_of_plain_vllm(
    rust: Graph, reference: PlainServer, kind: str, name: str, stream: bool
):
    request = (CHATS if kind == "chat" else COMPLETIONS)[name]
    expected = ask(reference, kind, request, stream=stream)
    [choice] = expected["choices"]
    assert expected["tokens"] and choice["text"]
    if stream and request.get("echo"):
        # A stream of `vllm-rs` has no log-probabilities of the prompt.
        choice["logprobs"] = choice["logprobs"][-request["max_tokens"] :]
    assert_same(ask(rust, kind, request, stream=stream), expected)
