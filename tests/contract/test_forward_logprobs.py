"""SGLang's log probabilities of the prompt's tokens: both engines' in one answer."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dynamo_lite.forward.rewriting import InputLogprobs
from tests.forwarding import Rig, rig
from tests.scripted import Fault

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

PREFILL: list[Any] = [[None, 5, None], [-0.1234567890123456789, 6, None]]
DECODE: list[Any] = [[-2.5, 7, None]]
ASKED: dict[str, Any] = {"text": "hello", "return_logprob": True}


@asynccontextmanager
async def engines(**options: Any) -> AsyncIterator[Rig]:
    async with rig("sglang", **options) as r:
        for one, given in ((r.prefill, PREFILL), (r.decode, DECODE)):
            for engine in one:
                engine.input_logprobs = given
        yield r


def listed(answer: Any) -> Any:
    return answer["meta_info"].get("input_token_logprobs")


async def events(r: Rig, **fields: Any) -> list[Any]:
    body = {**ASKED, "stream": True, **fields}
    async with r.session.post(f"{r.url}/generate", json=body) as answer:
        assert answer.status == 200
        lines = (await answer.read()).splitlines()
    payloads = [line[6:] for line in lines if line.startswith(b"data: ")]
    assert payloads.pop() == b"[DONE]"
    return [json.loads(payload) for payload in payloads]


async def test_the_prefill_engines_come_first_where_they_are_asked_for():
    """In a whole answer, in each event of a stream, and of each sequence of a batch."""
    async with engines() as r:
        status, answer = await r.ask(ASKED, route="/generate")
        assert status == 200 and listed(answer) == PREFILL + DECODE
        assert answer["meta_info"]["id"] == "1" and answer["text"] == "t"
        for line_end in (b"\n", b"\r\n"):
            r.prefill[0].line_end = r.decode[0].line_end = line_end
            assert [listed(event) for event in await events(r)] == [PREFILL + DECODE] * 2
        status, answers = await r.ask({**ASKED, "text": ["a", "b"]}, route="/generate")
        assert status == 200 and [listed(one) for one in answers] == [PREFILL + DECODE] * 2
        shown = await events(r, text=["a", "b"])
        assert [(one["index"], len(listed(one))) for one in shown] == [(0, 3), (1, 3)] * 2
        for fields in ({}, {"return_logprob": False}, {"return_logprob": [False]}):
            _, answer = await r.ask({"text": "hello", **fields}, route="/generate")
            assert listed(answer) is None
        assert listed((await events(r, return_logprob=False))[0]) is None


async def test_a_prefill_leg_that_breaks_off_is_repeated():
    async with engines(prefill=2) as r:
        r.prefill[0].faults.append(Fault("after_head"))
        assert [listed(event) for event in await events(r)] == [PREFILL + DECODE] * 2
        assert [len(engine.legs) for engine in r.prefill] == [1, 1]


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        ('{"meta_info":{"input_token_logprobs":[]}}', "[1]", [1]),
        ('{"meta_info":{"input_token_logprobs":[ 1e-300 ]}}', "[]", [1e-300]),
        ('{"meta_info":{"input_token_logprobs":[1]}}', "null", None),
        ('{"meta_info":{}}', "[2]", [2]),
        ("nonsense", "[2]", [2]),
        ('data: {"meta_info":{"input_token_logprobs":[1]}}\n\ndata: [DONE]\n\n', "[2]", [1, 2]),
    ],
)
def test_what_is_missing_changes_nothing(prefill: str, decode: str, expected: Any):
    logprobs = InputLogprobs()
    logprobs.read(prefill.encode())
    document = b'{"meta_info":{"input_token_logprobs":' + decode.encode() + b',"x":1}}'
    shown = json.loads(logprobs.joined(document))
    assert shown["meta_info"] == {"input_token_logprobs": expected, "x": 1}
    for document in (b'"input_token_logprobs"', b'{"input_token_logprobs":[1]}', b"{", b"[DONE]"):
        assert logprobs.joined(document) == document
