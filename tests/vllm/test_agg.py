"""The aggregated graph: one engine per worker, and nothing is handed over."""

import pytest

from tests.vllm.graph import Graph, PlainServer
from tests.vllm.test_answers import CHATS, COMPLETIONS, compare, streaming

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]


def test_it_answers_like_plain_vllm(agg: Graph, reference: PlainServer):
    for kind, request in (
        ("chat", CHATS["long"]),
        ("chat", CHATS["schema"] | streaming(True)),
        ("completions", COMPLETIONS["logprobs"]),
    ):
        compare(agg, reference, kind, request)
    assert agg.count("VllmWorker", "dynamo_lite_prefill_decisions_total") == 0
    assert not agg.errors()
