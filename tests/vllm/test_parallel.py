"""Engines that spread heads and layers, or write them, differently: plain vLLM's answers.

A worker of another parallelism joins the shared graph, whose own workers have one rank
each. The other worker of its kind stays, so questions go on until it has had its share.
"""

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.asking import prompt_ids, tokens_of
from tests.vllm.graph import MODEL, Graph, PlainServer
from tests.vllm.test_decisions import LIMIT, REMOTE
from tests.vllm.test_membership import JOBS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

#: Prompts of each round: full and begun blocks, one chunk and several.
LENGTHS = (LIMIT + 1, LIMIT + 32, 700, 1037, 2081, 2600)
MAX_ROUNDS = 8
SHARE = 4
SEEDS = count(700)

TENSOR: dict[str, Any] = {"tensor-parallel-size": 2}
EARLY: dict[str, Any] = {"stream-layers": True}
#: vLLM's CPU build runs stages behind the first only after its warm-up for compiled models.
PIPELINE: dict[str, Any] = {
    "pipeline-parallel-size": 2,
    "enforce-eager": False,
    "compilation-config": {"mode": 2, "backend": "eager", "ir_enable_torch_wrap": False},
}


def handed_over(joined: Graph, service: str) -> float:
    """Remote prefills that the joined worker has written, or was written."""
    if service == "PrefillWorker":
        return joined.count(service, JOBS, outcome="written")
    return joined.count(service, REMOTE, outcome="committed")


def went_wrong(graph: Graph) -> float:
    """Remote prefills that brought something else than they should, or could not be written.

    Not those that were late: engines of three workers share the cores here.
    """
    outcomes = ("corrupt", "writer_failed")
    return sum(graph.count("VllmWorker", REMOTE, outcome=outcome) for outcome in outcomes)


@pytest.mark.parametrize(
    ("service", "changes"),
    [
        pytest.param("PrefillWorker", TENSOR | EARLY, id="TP 2 to 1, layers written early"),
        pytest.param("PrefillWorker", PIPELINE, id="PP 2 to 1"),
        pytest.param("VllmWorker", TENSOR, id="TP 1 to 2"),
    ],
)
async def test_answers_are_the_same_across_parallelism(
    disagg: Graph, reference: PlainServer, tmp_path: Path, service: str, changes: dict[str, Any]
):
    """The joined worker has its share of prompts."""
    changed = [f"--{service}.{key}={json.dumps(value)}" for key, value in changes.items()]
    before = went_wrong(disagg)
    servers = ["--nats-url", disagg.nats_url, "--etcd-url", disagg.etcd_url]
    with Graph(tmp_path, options=[*servers, *changed], service=service) as joined:
        for _ in range(MAX_ROUNDS):
            seed = next(SEEDS)
            asked = [{"prompt": prompt_ids(n, seed), "max_tokens": 12} for n in LENGTHS]
            expected = await tokens_of(reference.url, asked)
            assert await tokens_of(disagg.url, asked, concurrency=4) == expected
            if handed_over(joined, service) >= SHARE:
                break
        assert handed_over(joined, service) >= SHARE
        assert (went_wrong(disagg), went_wrong(joined)) == (before, 0)
        assert not joined.errors(), joined.errors()
        if EARLY.items() <= changes.items():
            writes = joined.count(service, "dynamo_lite_kv_transfer_seconds_count")
            layers = json.loads((MODEL / "config.json").read_text())["num_hidden_layers"]
            assert writes >= SHARE * layers
    await disagg.settled()
