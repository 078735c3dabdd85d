"""A prefill engine with KV that would be wrong writes none, and reports why."""

import pytest

from tests.vllm.asking import ask, assert_same, prompt_ids
from tests.vllm.graph import Graph, PlainServer, eventually
from tests.vllm.test_decisions import LIMIT, REMOTE, completion
from tests.vllm.test_discovery import links_of

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]


def test_a_prefill_engine_with_another_rope_scaling_is_not_used(
    mixed: Graph, reference: PlainServer
):
    def failed() -> list[dict]:
        return [row for row in links_of(mixed) if row["state"] == "failed"]

    (row,) = eventually(failed, timeout_s=30, what="the engines are compared")
    assert row["detail"].startswith("config: '") and "; rope: '{" in row["detail"]
    prompt = completion(prompt_ids(LIMIT + 100, seed=600))
    got = ask(mixed.url, "completions", prompt)
    assert_same(got, ask(reference.url, "completions", prompt))
    assert mixed.count("VllmWorker", REMOTE, outcome="committed") == 0
