"""The aggregated graph: one engine per worker, and nothing is handed over."""

from typing import Any

import pytest

from tests.vllm.graph import AGG, PlainServer
from tests.vllm.test_answers import CHATS, COMPLETIONS, compare, streaming

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def test_it_answers_like_plain_vllm(stage: Any, reference: PlainServer):
    with stage.alone(AGG) as graph:
        for kind, request in (
            ("chat", CHATS["long"]),
            ("chat", CHATS["schema"] | streaming(True)),
            ("completions", COMPLETIONS["logprobs"]),
        ):
            compare(graph, reference, kind, request)
        assert graph.count("VllmWorker", "dynamo_lite_prefill_decisions_total") == 0
    assert not graph.errors()
