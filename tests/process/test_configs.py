"""Packaged configurations with two workers of each kind, and static ones, with null engines."""

import json
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.process.asking_graph import answer
from tests.process.command import VLLM_PATIENCE_S, Serving, eventually, serving

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]

GRAPH = "tests.process.asking_graph:Frontend"
#: About 5 and 2,100 tokens.
SHORT, LONG = "hello", " ".join(f"word{number}" for number in range(2000, 2300))
TOKENS = 12
#: At a time, of each kind.
MANY = 8
DECISIONS, JOBS = "dynamo_lite_prefill_decisions_total", "dynamo_lite_prefill_jobs_total"


def samples(graph: Serving, service: str, name: str) -> dict[str, Counter[str]]:
    """By process: how often each value of the metric's labels, without zeros."""
    found: dict[str, Counter[str]] = {}
    for process, entry in graph.processes().items():
        if entry["service"] == service:
            page = httpx.get(f"{entry['status_url']}/metrics", timeout=30).text
            found[process] = Counter(
                {
                    "/".join(sample.labels[label] for label in sorted(sample.labels)): sample.value
                    for family in text_string_to_metric_families(page)
                    for sample in family.samples
                    if sample.name == name and sample.value
                }
            )
    return found


def total(counters: dict[str, Counter[str]]) -> dict[str, float]:
    return dict(sum(counters.values(), Counter()))


@pytest.mark.parametrize(
    ("config", "workers", "short"),
    [
        ("disagg_2p2d", 2, "short/local"),
        # No prompt is short.
        ("static_1p1d", 1, "long/remote"),
    ],
)
def test_a_packaged_configuration_serves(config: str, workers: int, short: str, tmp_path: Path):
    options = ("-f", f"configs/{config}.yaml", "--Frontend.port=0", "--PrefillWorker.write-s=0.3")
    with serving(tmp_path, *options, graph=GRAPH) as graph, httpx.Client(timeout=60) as client:
        url = graph.wait_line("ready http", VLLM_PATIENCE_S).split()[1]

        def ask(prompt: str) -> str:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
            reply = client.post(f"{url}/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            [choice] = reply.json()["choices"]
            assert choice["text"] == answer(reply.json()["usage"]["prompt_tokens"], TOKENS)
            return choice["text"]

        def decided() -> dict[str, float]:
            return total(samples(graph, "VllmWorker", DECISIONS))

        expected = Counter[str]()
        answers: dict[str, str] = {}
        for prompt, verdict in ((SHORT, short), (LONG, "long/remote")):
            answers[prompt] = ask(prompt)
            expected[verdict] += 1
            assert decided() == expected
        with ThreadPoolExecutor(2 * MANY) as threads:
            prompts = [SHORT, LONG] * MANY
            assert list(threads.map(ask, prompts)) == [answers[prompt] for prompt in prompts]
        expected[short] += MANY
        expected["long/remote"] += MANY
        assert decided() == expected

        def written() -> bool:
            return total(samples(graph, "PrefillWorker", JOBS)) == {
                "written": expected["long/remote"]
            }

        eventually(written, "every remote prefill ends once")
        # Every worker of either kind has worked.
        for service, name in (("VllmWorker", DECISIONS), ("PrefillWorker", JOBS)):
            by_process = samples(graph, service, name)
            assert len(by_process) == workers and all(by_process.values()), by_process
        assert graph.end(signal.SIGINT) == 0, json.dumps(graph.output)
