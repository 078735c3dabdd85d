"""What is made of scraped metrics: rates, quantiles, resets, processes that come and go."""

import io
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from rich.console import Console

from dynamo_lite.cli.top import as_frame, as_next_try
from dynamo_lite.planner.drains import GraphSeen
from dynamo_lite.protocol.records import LinkRecord
from dynamo_lite.runtime.overview.compose import WANTED, compose, processes
from dynamo_lite.runtime.overview.metrics import CounterHistory, Samples, parse, quantile
from dynamo_lite.runtime.overview.model import Overview
from tests.builders import endpoint_record

DECODE, PREFILL, FRONTEND = 0xD, 0xE, 0xF
READY = {"ok": True, "state": "ready", "instance": 0}


class Process:
    """Real metrics of the names that are looked at, read back from their text."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own = {"registry": self.registry}
        self.decisions = Counter("dynamo_lite_prefill_decisions", "", ["verdict", "reason"], **own)
        self.jobs = Counter("dynamo_lite_prefill_jobs", "", ["outcome"], **own)
        self.bytes = Counter("dynamo_lite_kv_transfer_bytes", "", **own)
        self.depth = Gauge("dynamo_lite_prefill_queue_depth", "", **own)
        self.ttft = Histogram(
            "vllm:time_to_first_token_seconds", "", ["model"], buckets=(0.1, 0.2, 0.4), **own
        )
        Counter("dynamo_lite_dropped_messages", "", **own).inc()
        self.depth.set(math.nan)

    def samples(self) -> Samples:
        return parse(generate_latest(self.registry).decode(), WANTED)

    def decide(self, verdict: str, reason: str, times: int) -> None:
        self.decisions.labels(verdict, reason).inc(times)


MEMBERS = (
    endpoint_record(FRONTEND, "Processor", "completions", model="tiny", started_at=90.0),
    endpoint_record(FRONTEND, "Frontend", "http", started_at=90.0),
    endpoint_record(PREFILL, "PrefillWorker", "prefill", model="some/where/tiny", started_at=90.0),
    endpoint_record(DECODE, "VllmWorker", "load_metrics", started_at=90.0),
    endpoint_record(DECODE, "VllmWorker", "generate", model="some/where/tiny", started_at=90.0),
)


def view(
    history: CounterHistory,
    facts: Mapping[int, Mapping[str, Any]] = MappingProxyType({}),
    links: Iterable[LinkRecord] = (),
) -> Overview:
    return compose(100.0, "t", processes(MEMBERS), facts, history, links)


@pytest.mark.parametrize(
    "text",
    ["dynamo_lite_kv_transfer_bytes_total{", f"{WANTED[0]} x", f'{WANTED[-1]}_bucket{{le="x"}} 1'],
)
def test_what_is_no_metric_is_refused(text: str):
    with pytest.raises(ValueError):
        parse(text, WANTED)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e308", "1e19"])
def test_values_that_cannot_be_summed_are_left_out(value: str):
    """A process that tells such must not end the planner, which looks at all of them."""
    name, history = "dynamo_lite_prefill_decisions_total", CounterHistory(60.0)
    page = f'{name}{{verdict="remote",reason="long"}} {value}\n'
    for source in ("a", "b"):
        history.add(0.0, {source: parse(page, (name,))})
    assert view(history).decisions == []


def test_impossible_facts_are_unknown():
    huge, history = 10**400, CounterHistory(60.0)
    facts = {DECODE: {**READY, "running": huge, "waiting": -1, "kv_usage": huge}}
    seen = next(w for w in view(history, facts=facts).workers if w.component == "VllmWorker")
    assert (seen.running, seen.waiting, seen.kv_usage) == (None, None, None)
    record = next(one for one in MEMBERS if one.lease_id == DECODE)
    told = {DECODE: {"writers": ["1"], "writers_age_s": huge, "in_flight": huge}}
    graph = GraphSeen(records={DECODE: record}, facts=told)
    assert graph.writers(5.0) == {DECODE: None}
    assert [one.in_flight for one in graph.workers("VllmWorker")] == [None]


def test_a_counter_that_shrank_was_restarted():
    history, key, other = CounterHistory(60.0), ("a_total", ()), ("b_total", ())
    for now, page in enumerate(({key: 5.0}, {key: 8.0}, {key: 2.0, other: 4.0}, {key: 2.0})):
        history.add(float(now), {"a": page})
    assert history.window(60.0) == (3.0, {key: 5.0, other: 4.0})


@pytest.mark.parametrize(
    ("observed", "share", "expected"),
    [
        ([], 0.5, None),
        ([0.15, 0.15], 0.5, 0.15),
        ([0.05, 0.15, 0.3, 0.3], 0.5, 0.2),
        ([0.3], 1.0, 0.4),
        ([0.3], 0.5, 0.3),
        ([9.0], 0.95, 0.4),  # beyond all buckets: at least as much as the last one
    ],
)
def test_quantiles(observed: list[float], share: float, expected: float | None):
    process = Process()
    for seconds in observed:
        process.ttft.labels("m").observe(seconds)
    found = quantile(process.samples(), "vllm:time_to_first_token_seconds", share)
    assert found == (None if expected is None else pytest.approx(expected))


def test_rates_are_of_the_last_seconds_and_totals_of_all_time():
    process, history = Process(), CounterHistory(60.0)
    process.decide("local", "short", 40)
    history.add(0.0, {"d": process.samples()})
    assert [d.per_s for d in view(history).decisions] == [0.0]
    process.decide("remote", "long", 30)
    history.add(1.0, {"d": process.samples()})
    for now in range(2, 11):
        history.add(float(now), {"d": process.samples()})
    remote, local = view(history).decisions
    assert (remote.verdict, remote.reason, remote.total) == ("remote", "long", 30)
    assert remote.per_s == pytest.approx(3.0)
    assert (local.reason, local.per_s, local.total) == ("short", 0.0, 40)
    history.add(11.0, {"d": process.samples()})
    assert view(history).decisions[0].per_s == 0.0


def test_workers_that_do_not_answer_leave_or_come():
    first, second, history = Process(), Process(), CounterHistory(60.0)
    first.bytes.inc(1000)
    history.add(0.0, {"a": first.samples()})
    first.bytes.inc(500)
    second.bytes.inc(70)
    history.add(1.0, {"a": None, "b": second.samples()})
    seen = view(history).transfers
    assert (seen.bytes_per_s, seen.total_bytes) == (0.0, 1070)  # b may be old: no growth yet
    second.bytes.inc(20)
    history.add(2.0, {"a": first.samples(), "b": second.samples()})
    seen = view(history).transfers
    assert (seen.bytes_per_s, seen.total_bytes) == (pytest.approx(260.0), 1590)
    history.add(3.0, {"b": second.samples()})
    seen = view(history).transfers
    assert (round(seen.bytes_per_s * 3), seen.total_bytes) == (520, 90)


def test_workers_are_named_once_and_say_how_they_are():
    prefill, history = Process(), CounterHistory(60.0)
    prefill.depth.set(3)
    free = Gauge("dynamo_lite_kv_blocks_free", "", registry=prefill.registry)
    blocks = Gauge("dynamo_lite_kv_blocks_total", "", registry=prefill.registry)
    free.set(75)
    blocks.set(100)
    history.add(0.0, {str(PREFILL): prefill.samples(), str(DECODE): None})
    facts = {
        FRONTEND: {**READY, "requests": 9},
        PREFILL: {**READY, "jobs": 2},
        DECODE: {"state": "ready", "running": 4, "waiting": 1, "kv_usage": 0.5},
    }
    seen = view(history, facts=facts)
    said = [(w.component, w.state, w.model, w.running, w.waiting, w.kv_usage) for w in seen.workers]
    assert said == [
        ("Frontend", "ready", "", 9, None, None),
        ("PrefillWorker", "ready", "tiny", 2, None, 0.25),
        ("VllmWorker", "unwell", "tiny", 4, 1, 0.5),
    ]
    assert [(w.instance, w.age_s) for w in seen.workers] == [(0, 10.0), (0, 10.0), (None, 10.0)]
    assert (seen.queue.jobs, seen.queue.tokens, seen.in_flight) == (3, None, None)
    silent = view(history, facts={DECODE: {}}).workers[-1]
    assert (silent.component, silent.state, silent.running) == ("VllmWorker", "silent", None)


@pytest.mark.parametrize(("depth", "jobs"), [(0, 2), (5, 5), (math.nan, 2)])
def test_a_job_that_is_computed_counts_before_the_depth_is_read_again(depth: float, jobs: int):
    prefill, history = Process(), CounterHistory(60.0)
    prefill.depth.set(depth)
    Gauge("dynamo_lite_prefill_queue_tokens", "", registry=prefill.registry).set(2709)
    history.add(0.0, {str(PREFILL): prefill.samples()})
    queue = view(history, facts={PREFILL: {**READY, "jobs": 2}}).queue
    assert (queue.jobs, queue.tokens) == (jobs, 2709)


def test_what_forwarders_know_and_answer():
    first, second, history = Process(), Process(), CounterHistory(60.0)
    for process, usable in ((first, (1, 1, 0)), (second, (1, 0, 0))):
        gauge = Gauge(
            "dynamo_lite_forward_engine_usable", "", ["engine", "role"], registry=process.registry
        )
        places = (("a:1", "prefill"), ("b:1", "prefill"), ("c:1", "decode"))
        for place, value in zip(places, usable, strict=True):
            gauge.labels(*place).set(value)
        Gauge("dynamo_lite_forward_requests", "", registry=process.registry).set(2)
    answers = Counter("dynamo_lite_forward_answers", "", ["how", "reason"], registry=first.registry)
    both = {"f": first, "g": second}
    answers.labels("alone", "n").inc()
    history.add(0.0, {name: process.samples() for name, process in both.items()})
    answers.labels("disaggregated", "").inc(5)
    history.add(1.0, {name: process.samples() for name, process in both.items()})
    seen = view(history)
    assert seen.in_flight == 4
    assert [(e.role, e.usable, e.known) for e in seen.engines] == [
        ("prefill", 1, 2),
        ("decode", 0, 1),
    ]
    assert [(d.verdict, d.reason, d.per_s, d.total) for d in seen.decisions] == [
        ("disaggregated", "", 5.0, 5),
        ("alone", "n", 0.0, 1),
    ]


def test_links_of_those_who_left_are_not_shown():
    def link(decode: int) -> LinkRecord:
        return LinkRecord(
            prefill_lease_id=PREFILL,
            engine_id=f"e{decode}",
            decode_lease_id=decode,
            detail=f"no way to {decode:x}",
            next_try=2.0,
        )

    seen = view(CounterHistory(60.0), links=[link(DECODE), link(0xBEEF)])
    [found] = seen.failed_links
    assert (found.decode, found.detail, found.next_try) == ("d", "no way to d", 2.0)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(as_frame(seen))
    [line] = [line for line in console.export_text().splitlines() if "no way" in line]
    assert line.split() == ["e", "d", as_next_try(2.0), "no", "way", "to", "d"]
