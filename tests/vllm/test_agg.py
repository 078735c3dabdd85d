"""The aggregated graph: one engine per worker, and nothing is handed over."""

from pathlib import Path

import pytest

from tests.vllm.conftest import Stage
from tests.vllm.graph import AGG, UNCOMPILED, Graph, PlainServer
from tests.vllm.test_answers import CHATS, COMPLETIONS, compare, streaming

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]


def test_it_answers_like_plain_vllm(stage: Stage, reference: PlainServer, tmp_path: Path):
    stage.clear()
    options = [f"--VllmWorker.ServiceArgs.env.{key}={value}" for key, value in UNCOMPILED.items()]
    with Graph(tmp_path / "agg", AGG, options) as agg:
        for kind, request in (
            ("chat", CHATS["long"]),
            ("chat", CHATS["schema"] | streaming(True)),
            ("completions", COMPLETIONS["logprobs"]),
        ):
            compare(agg, reference, kind, request)
        assert agg.count("VllmWorker", "dynamo_lite_prefill_decisions_total") == 0
        assert not agg.errors()
