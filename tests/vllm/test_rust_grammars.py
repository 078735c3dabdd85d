"""Grammars on a graph that only vLLM's Rust frontend has asked: the engine's first one is its."""

from pathlib import Path

import pytest

from tests.vllm.asking import assert_same, prose
from tests.vllm.graph import Graph, PlainServer
from tests.vllm.test_edge import BAD_REQUESTS, post
from tests.vllm.test_rust_edge import BINARY, GREEDY, NEEDS_BINARY, TEXT, ask
from tests.vllm.test_rust_edge_remote import FOUND_BEHIND_IT

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300), NEEDS_BINARY]

SCHEMA = {
    "messages": [{"role": "user", "content": prose(12, 901)}],
    **GREEDY,
    "ignore_eos": False,
    "max_tokens": 40,
    "response_format": {
        "type": "json_schema",
        "json_schema": {
            "name": "x",
            "schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    },
}

REGEX = {**TEXT, "ignore_eos": False, "structured_outputs": {"regex": "[a-f ]{12}"}}


def test_grammars_get_the_verdict_and_the_tokens_of_vllms_python_server(
    slow: Graph, reference: PlainServer, tmp_path: Path
):
    options = [*slow.servers, "--Frontend.edge=rust", f"--Frontend.edge-binary={BINARY}"]
    with Graph(tmp_path, options=options, service="Frontend") as rust:
        for name in FOUND_BEHIND_IT:
            got = post(rust.url, *BAD_REQUESTS[name])
            assert got.status_code == 500, f"{name}: {got.text}"
        for kind, request in (("chat", SCHEMA), ("completions", REGEX)):
            got = ask(rust, kind, request, stream=False)
            assert got["tokens"]
            assert_same(got, ask(reference, kind, request, stream=False))
