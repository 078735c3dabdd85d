"""A prefill engine with KV that would be wrong writes none, and reports why."""

import json

import pytest

from tests.vllm.asking import ask, assert_same, prompt_ids
from tests.vllm.conftest import Stage
from tests.vllm.graph import PlainServer, eventually
from tests.vllm.test_decisions import LIMIT, REMOTE, completion
from tests.vllm.test_discovery import links_tried

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

SCALED = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}


def test_a_prefill_engine_with_another_rope_scaling_is_not_used(
    stage: Stage, reference: PlainServer
):
    with stage.alone(options=[f"--PrefillWorker.hf-overrides={json.dumps(SCALED)}"]) as graph:
        (row,) = eventually(lambda: links_tried(graph), timeout_s=30, what="tried links")
        assert row["state"] == "failed"
        assert row["detail"].startswith("config: '") and "; rope: '{" in row["detail"]
        prompt = completion(prompt_ids(LIMIT + 100, seed=600))
        got = ask(graph.url, "completions", prompt)
        assert_same(got, ask(reference.url, "completions", prompt))
        assert graph.count("VllmWorker", REMOTE, outcome="committed") == 0
