"""Where prompts are prefilled, as the counters tell it."""

from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import pytest

from tests.process.command import run
from tests.vllm.asking import ask, assert_same, client, prompt_ids
from tests.vllm.graph import Graph, PlainServer, eventually
from tests.vllm.live import command, explained

pytestmark = pytest.mark.timeout(300)

#: max-local-prefill-length of configs/disagg.yaml.
LIMIT = 512
DECISIONS = "dynamo_lite_prefill_decisions_total"
REMOTE = "dynamo_lite_remote_prefills_total"
WAITS = "dynamo_lite_single_flight_waits_total"
#: Layers, K and V, heads, head size, tokens, float32.
BLOCK_BYTES = 4 * 2 * 4 * 32 * 32 * 4


def completion(prompt: list[int]) -> dict:
    return {"prompt": prompt, "max_tokens": 8, "temperature": 0}


def counting(graph: Graph) -> Callable[[], dict[str, int]]:
    """A function that returns the decisions made since, without zero counts."""
    before = decisions(graph)

    def since() -> dict[str, int]:
        return {
            k: n - before.get(k, 0) for k, n in decisions(graph).items() if n > before.get(k, 0)
        }

    return since


def decisions(graph: Graph) -> dict[str, int]:
    found = {}
    for name, value in graph.metrics("VllmWorker").items():
        if name.startswith(DECISIONS):
            labels = dict(part.split("=") for part in name[len(DECISIONS) + 1 : -1].split(","))
            found[f"{labels['verdict']}/{labels['reason']}".replace('"', "")] = int(value)
    return found


def test_a_cached_prefix_does_not_count(disagg: Graph, reference: PlainServer):
    """The rest is short: local. Long again beyond the prefix: remote, from there on."""
    long = prompt_ids(2000, seed=101)
    longer = long + prompt_ids(LIMIT + 100, seed=102)
    for prompt, expected in (
        (long, "remote/long"),
        (long, "local/cached"),
        (long + prompt_ids(LIMIT // 2, seed=103), "local/cached"),
        (longer, "remote/long"),
        (longer, "local/cached"),
    ):
        since = counting(disagg)
        got = ask(disagg.url, "completions", completion(prompt))
        assert_same(got, ask(reference.url, "completions", completion(prompt)))
        assert eventually(since, timeout_s=5, what="a decision is counted") == {expected: 1}


def test_a_remote_prefill_is_counted_on_both_sides(disagg: Graph):
    """2100 tokens: 65 full blocks and the rest of one more, without the last token."""
    blocks_bytes = disagg.count("PrefillWorker", "dynamo_lite_kv_transfer_bytes_total")
    committed = disagg.count("VllmWorker", REMOTE, outcome="committed")
    written = disagg.count("PrefillWorker", "dynamo_lite_prefill_jobs_total", outcome="written")
    seconds = disagg.count("PrefillWorker", "dynamo_lite_kv_transfer_seconds_count")
    ask(disagg.url, "completions", completion(prompt_ids(2100, seed=104)))

    def counted() -> bool:
        return (
            disagg.count("VllmWorker", REMOTE, outcome="committed") == committed + 1
            and disagg.count("PrefillWorker", "dynamo_lite_prefill_jobs_total", outcome="written")
            == written + 1
            and disagg.count("PrefillWorker", "dynamo_lite_kv_transfer_seconds_count") > seconds
        )

    eventually(counted, timeout_s=5, what="the prefill is counted")
    sent = disagg.count("PrefillWorker", "dynamo_lite_kv_transfer_bytes_total") - blocks_bytes
    assert sent == 66 * BLOCK_BYTES


def test_siblings_are_prefilled_and_transferred_once(disagg: Graph, reference: PlainServer):
    """Three of four wait for the first one's KV, and hit the cache: 62 of 63 blocks of it."""
    drawn = {"n": 4, "temperature": 1, "seed": 11, "extra_body": {"return_token_ids": True}}
    request = completion(prompt_ids(2000, seed=105)) | drawn
    expected = ask(reference.url, "completions", request)
    sent = disagg.count("PrefillWorker", "dynamo_lite_kv_transfer_bytes_total")
    hits = disagg.count("VllmWorker", WAITS, outcome="hit")
    since = counting(disagg)
    got = ask(disagg.url, "completions", request)
    assert_same(got, expected)
    assert len({tuple(choice["token_ids"]) for choice in got["choices"]}) == 4

    def counted() -> bool:
        return sum(since().values()) == 4

    eventually(counted, timeout_s=5, what="the decisions are counted")
    assert since() == {"remote/long": 1, "local/single_flight": 3}
    assert disagg.count("VllmWorker", WAITS, outcome="hit") == hits + 3
    written = disagg.count("PrefillWorker", "dynamo_lite_kv_transfer_bytes_total") - sent
    assert written == 63 * BLOCK_BYTES


def test_a_decision_is_explained_by_the_id_of_the_answer(disagg: Graph):
    def decided(seed: int, **more: Any) -> list[dict[str, Any]]:
        request = completion(prompt_ids(700, seed=seed)) | more
        with client(disagg.url) as api:
            return explained(disagg, api.completions.create(model="tiny", **request).id)

    decided(106)
    [remote] = decided(107)
    assert (remote["verdict"], remote["reason"]) == ("remote", "long")
    assert remote["thresholds"]["max_local_prefill_length"] == LIMIT
    assert remote["asked"]["outcome"] == "committed"
    stages = {"decide", "queue", "fill", "resume"}
    assert remote["asked"]["stages_s"].keys() == stages
    [again] = decided(109, extra_headers={"X-Request-Id": "mine"})
    assert explained(disagg, "mine") == [{**again, "at": ANY, "age_s": ANY}]
    siblings = decided(108, n=2, temperature=1)
    assert sorted(d["reason"] for d in siblings) == ["long", "single_flight"]
    with client(disagg.url) as api:
        hello = [{"role": "user", "content": "Hello"}]
        chat = api.chat.completions.create(model="tiny", messages=hello, max_tokens=2)
    [short] = explained(disagg, chat.id)
    assert (short["verdict"], short["reason"]) == ("local", "short")
    lines = command(disagg, "explain", "--last", "2").splitlines()
    assert short["request_id"] in lines[-1] and lines[-1].split()[-3:-1] == ["local", "short"]
    unknown = run("explain", "cmpl-unknown", "--state-dir", str(disagg.state_dir.resolve()))
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "none of 1 decode engines has a decision of it" in unknown.stderr
