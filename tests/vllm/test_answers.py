"""The graph's answers are those of plain vLLM, whatever is asked and wherever it is prefilled."""

from typing import Any

import pytest

from tests.vllm.asking import ask, assert_same, prompt_ids, prose
from tests.vllm.graph import Graph, PlainServer

pytestmark = pytest.mark.timeout(300)

SHORT = [{"role": "user", "content": "What is on the plain?"}]
#: Well over the 512 tokens up to which a prompt is prefilled where it is decoded.
LONG = [
    {"role": "system", "content": prose(120, seed=1)},
    {"role": "user", "content": prose(600, seed=2)},
]
TRIP = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome", "Lima"]},
        "by": {"enum": ["train", "boat"]},
        "alone": {"type": "boolean"},
    },
    "required": ["city", "by", "alone"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": TRIP, "strict": True}}
    for name in ("travel", "commute")
]
GREEDY = {"temperature": 0, "max_tokens": 24}
DRAWN = {"temperature": 1, "seed": 11, "max_tokens": 24}
TRIP_FORMAT = {"type": "json_schema", "json_schema": {"name": "trip", "schema": TRIP}}

CHATS: dict[str, dict[str, Any]] = {
    "short": {"messages": SHORT, **GREEDY},
    "long": {"messages": LONG, **GREEDY},
    "two choices": {"messages": LONG, "n": 2, **DRAWN},
    "drawn": {"messages": LONG, **DRAWN},
    "drawn from few": {"messages": SHORT, **DRAWN, "top_p": 0.8, "presence_penalty": 0.5},
    "logprobs": {"messages": LONG, "logprobs": True, "top_logprobs": 3, **GREEDY},
    "schema": {"messages": LONG, "response_format": TRIP_FORMAT, **GREEDY, "max_tokens": 400},
    "any tool": {
        "messages": LONG,
        "tools": TOOLS,
        "tool_choice": "required",
        **GREEDY,
        "max_tokens": 400,
    },
    "this tool": {
        "messages": SHORT,
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "commute"}},
        **GREEDY,
        "max_tokens": 400,
    },
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "short": {"prompt": "Once upon a plain", **GREEDY},
    "long": {"prompt": prose(700, seed=3), **GREEDY},
    "tokens": {"prompt": prompt_ids(1500, seed=4), **GREEDY},
    "several prompts": {"prompt": [prompt_ids(n, seed=5) for n in (40, 900)], **GREEDY},
    "two choices": {"prompt": prompt_ids(800, seed=6), "n": 2, **DRAWN},
    "logprobs": {"prompt": prompt_ids(1200, seed=7), "logprobs": 3, **GREEDY},
    "echo": {"prompt": prompt_ids(700, seed=8), "echo": True, "logprobs": 2, **GREEDY},
    "drawn": {"prompt": prompt_ids(1000, seed=9), **DRAWN},
}


def cases(requests: dict[str, dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("name", list(requests))


def compare(graph: Graph, reference: PlainServer, kind: str, request: dict[str, Any]) -> Any:
    expected = ask(reference.url, kind, request)
    got = ask(graph.url, kind, request)
    assert_same(got, expected)
    return got


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@cases(CHATS)
def test_chat(disagg: Graph, reference: PlainServer, name: str, stream: bool):
    compare(disagg, reference, "chat", CHATS[name] | streaming(stream))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@cases(COMPLETIONS)
def test_completions(disagg: Graph, reference: PlainServer, name: str, stream: bool):
    compare(disagg, reference, "completions", COMPLETIONS[name] | streaming(stream))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_stop_strings(disagg: Graph, reference: PlainServer, kind: str, stream: bool):
    request = CHATS["long"] if kind == "chat" else COMPLETIONS["long"]
    choice = ask(reference.url, kind, request)["choices"][0]
    text = choice["message"]["content"] if kind == "chat" else choice["text"]
    stop = text[8:11]
    got = compare(disagg, reference, kind, request | {"stop": [stop]} | streaming(stream))
    assert (got["choices"][0]["finish_reason"], got["choices"][0]["stop_reason"]) == ("stop", stop)


def streaming(stream: bool) -> dict[str, Any]:
    return {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
