"""Bad input and clients that disconnect: they are refused or dropped."""

import json
import re

import httpx
import msgspec
import pytest

from dynamo_lite.protocol import names
from tests.vllm.asking import assert_same, prompt_ids
from tests.vllm.graph import NAMESPACE, Graph, PlainServer, eventually

pytestmark = pytest.mark.timeout(300)

#: xgrammar's messages begin with the time of day.
_CLOCK = re.compile(r"\[\d\d:\d\d:\d\d\]")
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TEXT = {"model": "tiny", "prompt": "hi", "max_tokens": 4}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

BAD_REQUESTS: dict[str, tuple[str, object]] = {
    "no JSON": ("chat/completions", b"{"),
    "no messages": ("chat/completions", {"model": "tiny"}),
    "unknown model": ("completions", TEXT | {"model": "other"}),
    "two choices without a draw": ("completions", TEXT | {"n": 2, "temperature": 0}),
    "too many logprobs": ("completions", TEXT | {"logprobs": 4000}),
    "another tool": (
        "chat/completions",
        CHAT | {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
    ),
    "a schema that is none": (
        "chat/completions",
        CHAT
        | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 7}}},
    ),
    "a grammar that is none": (
        "chat/completions",
        CHAT | {"structured_outputs": {"grammar": "root ::= ("}},
    ),
    "a regex that is none": ("completions", TEXT | {"structured_outputs": {"regex": "("}}),
    "tokens outside the vocabulary": ("completions", TEXT | {"prompt": [1, 99999]}),
    "prompt over the model's length": (
        "completions",
        TEXT | {"prompt": prompt_ids(8200, seed=300)},
    ),
    "chat over the model's length": (
        "chat/completions",
        CHAT | {"messages": [{"role": "user", "content": "plain " * 9000}]},
    ),
    "no such path": ("complete", TEXT),
}


def post(url: str, path: str, body: object) -> httpx.Response:
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    headers = {"content-type": "application/json"}
    return httpx.post(f"{url}/v1/{path}", content=content, headers=headers, timeout=60)


@pytest.mark.parametrize("name", list(BAD_REQUESTS))
def test_bad_requests_get_vllms_own_answer(disagg: Graph, reference: PlainServer, name: str):
    path, body = BAD_REQUESTS[name]
    expected, got = post(reference.url, path, body), post(disagg.url, path, body)
    assert got.status_code == expected.status_code and got.status_code >= 400, got.text
    said = (_CLOCK.sub("[time]", answer.text) for answer in (got, expected))
    assert_same(*(_without_ids(json.loads(text)) for text in said))
    if name.endswith("length"):
        assert got.status_code == 400


async def test_a_client_that_leaves_mid_stream_frees_the_engine(disagg: Graph):
    (before,) = await disagg.pools()
    body = TEXT | {
        "prompt": prompt_ids(900, seed=310),
        "max_tokens": 7000,
        "ignore_eos": True,
        "stream": True,
    }
    async with (
        httpx.AsyncClient(base_url=disagg.url, timeout=60) as http,
        http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        lines = answer.aiter_lines()
        assert "data:" in await anext(lines)
        assert disagg.health("VllmWorker")["in_flight"] == 1
    eventually(
        lambda: (lambda h: h["in_flight"] == h["running"] == 0)(disagg.health("VllmWorker")),
        timeout_s=10,
        what="the engine runs nothing",
    )
    (after,) = await disagg.pools()
    assert after.free_blocks == before.free_blocks


async def test_what_an_engine_drops_is_counted_by_its_component(disagg: Graph):
    def dropped() -> float:
        post(disagg.url, "completions", TEXT)  # an engine's counts come up with its steps
        return disagg.count("VllmWorker", "dynamo_lite_dropped_messages_total", where="claim")

    (pool,) = await disagg.pools()
    before = dropped()
    async with disagg.messaging() as messaging:
        subject = names.claim_subject(NAMESPACE, pool.metadata.engine_id)
        await messaging.publish(subject, b"\xc1 no message")
    eventually(lambda: dropped() > before, timeout_s=10, what="what came as a claim is counted")


def _without_ids(body: dict) -> dict:
    return {key: value for key, value in body.items() if key not in ("id", "created")}
