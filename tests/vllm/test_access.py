"""A whole graph in which each service has only the rights that `dynamo-lite access` prints."""

from pathlib import Path

import pytest

from tests.least_rights import least_rights
from tests.vllm.asking import ask, prompt_ids
from tests.vllm.conftest import Stage
from tests.vllm.graph import NAMESPACE, Graph, Lone, together

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]


def test_remote_prefill_works(stage: Stage, tmp_path: Path):
    stage.clear()
    with least_rights(tmp_path, NAMESPACE) as rights:
        decode, prefill = (
            Lone(tmp_path / name, name, rights.options(name), {})
            for name in ("VllmWorker", "PrefillWorker")
        )
        options = [*rights.options("Frontend"), "--Frontend.router=kv"]
        frontend = Graph(tmp_path / "Frontend", options=options, service="Frontend")
        services = (decode, prefill, frontend)
        with together(services):
            for seed in range(3):
                request = {"prompt": prompt_ids(1500, seed), "max_tokens": 4}
                ask(frontend.url, "completions", request)
            assert decode.handed_over() == 3
            ask(frontend.url, "completions", {"prompt": prompt_ids(20, 9), "max_tokens": 4})
        assert rights.violations() == []
    for service in services:
        for log in service.directory.glob("**/logs/*.log"):
            text = log.read_text(errors="replace").lower()
            assert "permission denied" not in text and "permissions violation" not in text, log
