"""First tokens from the prefill worker: the answers stay those of plain vLLM."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.vllm.asking import ask, assert_same, client, prompt_ids, prose
from tests.vllm.graph import Graph, PlainServer, eventually

pytestmark = pytest.mark.timeout(300)

ARRIVED = "dynamo_lite_first_tokens_total"
DIFFERENT = "dynamo_lite_first_token_differences_total"
REMOTE = "dynamo_lite_remote_prefills_total"
VLLM_ONLY = {"min_tokens", "repetition_penalty", "stop_token_ids"}
GREEDY = {"temperature": 0, "max_tokens": 16}


def arrivals(graph: Graph) -> Callable[[], dict[str, int]]:
    """A function that returns the outcomes of first tokens since."""

    def counted() -> dict[str, float]:
        return {o: graph.count("VllmWorker", ARRIVED, outcome=o) for o in ("sent", "late", "last")}

    before = counted()

    def since() -> dict[str, int]:
        return {o: int(now - before[o]) for o, now in counted().items() if now > before[o]}

    return since


def arrived(since: Callable[[], dict[str, int]], number: int) -> dict[str, int]:
    """The outcomes of that many first tokens. The last may arrive after its answer."""
    eventually(lambda: sum(since().values()) == number, timeout_s=20, what="first tokens arrive")
    return since()


def handed_over(graph: Graph) -> Callable[[], int]:
    """A function that returns how many remote prefills have succeeded since."""
    before = graph.count("VllmWorker", REMOTE, outcome="committed")
    return lambda: int(graph.count("VllmWorker", REMOTE, outcome="committed") - before)


def compare(graph: Graph, reference: PlainServer, request: dict[str, Any]) -> dict[str, Any]:
    got = ours(graph.url, request)
    assert_same(got, ours(reference.url, request))
    return got


def ours(url: str, request: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's client takes vLLM's own parameters apart from its own."""
    own = {k: v for k, v in request.items() if k in VLLM_ONLY}
    known = {k: v for k, v in request.items() if k not in VLLM_ONLY}
    return ask(url, "completions", known | {"extra_body": {"return_token_ids": True, **own}})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_greedy_answers_begin_with_the_prefill_workers_token(
    disagg: Graph, reference: PlainServer, stream: bool
):
    since, different = arrivals(disagg), disagg.count("VllmWorker", DIFFERENT)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    # The last one's tokens without the last fill whole chunks and blocks.
    for number, tokens in enumerate((700, 1024, 1601, 2049)):
        request = {"prompt": prompt_ids(tokens, seed=200 + number + 10 * stream)}
        compare(disagg, reference, request | GREEDY | options)
    # The decode engine's token may come first now and then.
    assert arrived(since, 4)["sent"] >= 1
    assert disagg.count("VllmWorker", DIFFERENT) == different


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_usage_says_which_tokens_were_cached_before(
    disagg: Graph, reference: PlainServer, kind: str
):
    """Those that a prefill worker has computed for the request are none of them, with a first token
    from it (chat) or without one."""
    since, remote = arrivals(disagg), handed_over(disagg)
    own: dict[str, Any] = {"prompt": prompt_ids(2009, seed=230), "logprobs": 1}
    if kind == "chat":
        own = {"messages": [{"role": "user", "content": prose(600, seed=231)}]}
    own |= GREEDY | {"stream": True, "stream_options": {"include_usage": True}}
    for again in (False, True):
        told: list[dict[str, Any]] = []
        for url in (disagg.url, reference.url):
            with client(url) as api:
                create = api.chat.completions.create if kind == "chat" else api.completions.create
                *_, last = create(model="tiny", **own)
                told.append(last.model_dump()["usage"])
        assert told[0] == told[1] and remote() == 1
        assert (told[0]["prompt_tokens_details"]["cached_tokens"] > 0) is again
    assert arrived(since, 1) if kind == "chat" else not since()


def test_a_stop_token_is_left_to_the_decode_engine(disagg: Graph, reference: PlainServer):
    request = {"prompt": prompt_ids(900, seed=220), **GREEDY}
    first = ours(reference.url, request)["choices"][0]["token_ids"][0]
    since = arrivals(disagg)
    # Another prompt than before, to the prefix cache of either engine.
    got = compare(disagg, reference, request | {"stop_token_ids": [first]})
    assert got["choices"][0]["stop_reason"] == first
    assert got["choices"][0]["token_ids"] == [first]
    assert "sent" not in arrived(since, 1)
