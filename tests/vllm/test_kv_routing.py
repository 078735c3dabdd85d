"""Two decode workers with `router: kv`: a prompt goes where its prefix is."""

import pytest

from tests.vllm.asking import ask, prompt_ids
from tests.vllm.graph import Graph, eventually
from tests.vllm.test_decisions import LIMIT, completion, counting

pytestmark = pytest.mark.timeout(300)

BLOCK = 32
CHOICES = "dynamo_lite_router_choices_total"


def known_blocks(graph: Graph) -> float:
    return graph.count("Frontend", "dynamo_lite_kv_index_blocks")


def test_a_prompt_goes_to_the_worker_that_holds_its_prefix(pair: Graph):
    """Long prompts are prefilled remotely once, and then cached by one of the two workers:
    elsewhere they would be long again."""
    since = counting(pair)
    for number in range(3):
        prompt = prompt_ids(LIMIT + 100, seed=900 + number)
        before = known_blocks(pair)
        ask(pair.url, "completions", completion(prompt))
        full = len(prompt) // BLOCK
        eventually(
            lambda seen=before + full: known_blocks(pair) == seen,
            timeout_s=10,
            what="the worker's events are in the index",
        )
        chosen = pair.count("Frontend", CHOICES, reason="prefix")
        matched = pair.count("Frontend", "dynamo_lite_router_matched_tokens_total")
        ask(pair.url, "completions", completion(prompt + prompt_ids(20, seed=910 + number)))
        assert pair.count("Frontend", CHOICES, reason="prefix") == chosen + 1
        now = pair.count("Frontend", "dynamo_lite_router_matched_tokens_total")
        assert now == matched + full * BLOCK
    expected = {"remote/long": 3, "local/cached": 3}
    eventually(lambda: since() == expected, timeout_s=5, what="each prompt is prefilled once")
