"""Traces of requests through a real graph, as an OTLP collector gets them."""

from itertools import chain, pairwise
from typing import Any

import httpx
import pytest

from dynamo_lite.protocol.trace import TraceContext, new_trace
from tests.collector import Collector, Seen
from tests.vllm.asking import prompt_ids
from tests.vllm.graph import Graph, eventually

pytestmark = pytest.mark.timeout(300)

#: Name, of which component, below which: all of a remote prefill.
REMOTE = {
    ("generate", "Frontend", "client"),
    ("route", "Frontend", "generate"),
    ("decision", "VllmWorker", "generate"),
    ("remote prefill", "VllmWorker", "generate"),
    ("queue wait", "VllmWorker", "remote prefill"),
    ("prefill job", "PrefillWorker", "remote prefill"),
    ("claim", "PrefillWorker", "prefill job"),
    ("wait", "PrefillWorker", "prefill job"),
    ("transfer", "PrefillWorker", "prefill job"),
    ("resume", "VllmWorker", "generate"),
}
#: One after the other. A job may be pulled before the broker has confirmed its push.
ORDER = (
    *("generate", "decision", "remote prefill"),
    *("prefill job", "wait", "transfer", "resume"),
)
#: In the order of their ends. Ends of the two chains have no order: a write has ended when its
#: writer sees it, which may be after the decode worker has read its notification.
CHAINS = (("decision", "claim", "transfer"), ("wait", "remote prefill", "resume"))
#: Each process relates its monotonic clock to the wall clock by itself; and a claim is
#: taken to hold from half-way through the request for it.
SLACK_NS = 5_000_000


def asked(graph: Graph, tokens: int, seed: int, traceparent: str) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt_ids(tokens, seed), "max_tokens": 4}
    headers = {"traceparent": traceparent, "tracestate": "vendor=1"}
    answer = httpx.post(f"{graph.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def tree(spans: list[Seen], client: TraceContext) -> set[tuple[str, str, str]]:
    names = {span.span_id: span.name for span in spans} | {client.span_id: "client"}
    return {(span.name, span.service, names.get(span.parent, "nobody")) for span in spans}


def trace_of(
    collector: Collector, client: TraceContext, expected: set[tuple[str, str, str]]
) -> list[Seen]:
    def missing() -> set[tuple[str, str, str]]:
        return expected - tree(collector.spans(client.trace_id), client)

    try:
        eventually(lambda: not missing(), timeout_s=20, what="all stages are exported")
    except AssertionError as exc:
        told = [(span.name, span.attributes) for span in collector.spans(client.trace_id)]
        raise AssertionError(f"{exc}: {missing()} are missing beside {told}") from None
    spans = collector.spans(client.trace_id)
    assert tree(spans, client) == expected
    return spans


def test_one_trace_of_a_remote_prefill_has_every_stage(disagg: Graph, collector: Collector):
    client = new_trace()
    answer = asked(disagg, 4500, 300, client.headers()["traceparent"])
    spans = trace_of(collector, client, REMOTE)
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    for span in spans:
        assert span.start <= span.end and not span.failed
        if span.parent != client.span_id:
            assert by_id[span.parent].start <= span.start + SLACK_NS, span
    first = {name: next(s for s in spans if s.name == name) for name, _, _ in REMOTE}
    last = {name: [s for s in spans if s.name == name][-1] for name, _, _ in REMOTE}
    for earlier, later in pairwise(ORDER):
        assert first[earlier].start <= first[later].start + SLACK_NS, (earlier, later)
    for earlier, later in chain.from_iterable(map(pairwise, CHAINS)):
        assert last[earlier].end <= last[later].end + SLACK_NS, (earlier, later)
    assert last["transfer"].start <= first["remote prefill"].end + SLACK_NS
    assert first["resume"].end <= first["generate"].end + SLACK_NS
    # Several chunks, each written while the next one is computed.
    writes = [span for span in spans if span.name == "transfer"]
    assert len(writes) > 1
    assert sum(s.attributes["dynamo_lite.blocks"] for s in writes) == -(-4499 // 32)
    assert first["decision"].attributes["dynamo_lite.reason"] == "long"
    assert first["remote prefill"].attributes["dynamo_lite.outcome"] == "committed"
    told = first["generate"].attributes
    assert told["gen_ai.request.id"].startswith(answer["id"])
    assert told["gen_ai.usage.prompt_tokens"] == 4500
    assert told["gen_ai.usage.completion_tokens"] == 4
