"""The Grafana dashboard asks for metrics and labels that processes really have."""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge

from dynamo_lite.disagg.counters import RemotePrefillMetrics
from dynamo_lite.planner.planner import PlannerMetrics
from dynamo_lite.request_plane.admission import Admission
from dynamo_lite.request_plane.failover import FailoverStats
from dynamo_lite.runtime.process.host import add_metrics
from dynamo_lite.serve.services.metrics import (
    DECODE_GAUGES,
    RequestMetrics,
    RouterMetrics,
)
from tests.builders import process_spec
from tests.unit.prefill_rig import Rig

DASHBOARD = json.loads(
    (Path(__file__).parents[2] / "dashboards/dynamo_lite.json").read_text(encoding="utf-8")
)
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(p["title"], t["expr"], t["legendFormat"]) for p in PANELS for t in p["targets"]]

FUNCTIONS = {"count", "histogram_quantile", "max", "min", "rate", "sum"}
#: What Prometheus itself adds.
TARGET_LABELS = {"instance", "job"}
SUFFIXES = {
    "counter": ("_total",),
    "histogram": ("_bucket", "_sum", "_count"),
    "gauge": ("",),
    "info": ("_info",),
}

_STRING = re.compile(r'"[^"]*"')
_GROUPING = re.compile(r"\b(?:by|on|group_left)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"(\w+)\{([^}]*)\}")
_WORD = re.compile(r"[a-zA-Z_]\w*")


def registries() -> Iterator[CollectorRegistry]:
    """As the components fill theirs."""
    process: Any = SimpleNamespace(
        remaining_s=lambda: 0.0, connected=True, watch_connection=contextlib.nullcontext
    )
    spec = process_spec("C", nats_url="nats://x")
    frontend, decode, planner = CollectorRegistry(), CollectorRegistry(), CollectorRegistry()
    picker: Any = SimpleNamespace(choices=Counter(), prompt_tokens=0, matched_tokens=0)
    frontend.register(RequestMetrics(FailoverStats(), Counter(), Admission()))
    frontend.register(RouterMetrics(picker))
    add_metrics(frontend, spec, process, process)
    RemotePrefillMetrics(decode)
    for name, text, _ in DECODE_GAUGES:
        Gauge(name, text, registry=decode)
    PlannerMetrics(planner)
    return iter((frontend, decode, planner, Rig().registry))


def known() -> dict[str, set[str]]:
    """Every sample's name, with its labels."""
    found: dict[str, set[str]] = {}
    for registry in registries():
        for collector in registry._collector_to_names:
            own = set(getattr(collector, "_labelnames", ()))
            for family in collector.collect():
                labels = own.union(*(sample.labels for sample in family.samples))
                for suffix in SUFFIXES[family.type]:
                    more = {"le"} if suffix == "_bucket" else set()
                    found[family.name + suffix] = labels - {"le"} | more
    return found


@pytest.fixture(scope="module")
def metrics() -> dict[str, set[str]]:
    return known()


def names_in(expression: str) -> set[str]:
    """The metrics of a query: its words that are nothing else."""
    bare = _GROUPING.sub(" ", _STRING.sub("", expression))
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", bare)
    return set(_WORD.findall(bare)) - FUNCTIONS


def complaints(expression: str, legend: str, metrics: dict[str, set[str]]) -> Iterator[str]:
    names = names_in(expression)
    if not names:
        yield "asks for nothing"
    yield from (f"no metric {name}" for name in sorted(names - metrics.keys()))
    has = TARGET_LABELS.union(*(metrics.get(name, set()) for name in names))
    grouped = {label for group in _GROUPING.findall(expression) for label in _WORD.findall(group)}
    yield from (f"no label {label}" for label in sorted(grouped - has))
    for name, matchers in _SELECTOR.findall(expression):
        asked = set(_WORD.findall(_STRING.sub("", matchers)))
        yield from (f"no label {x} of {name}" for x in asked - metrics.get(name, set()))
    shown = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", legend))
    yield from (f"the legend's {label} is not in the result" for label in sorted(shown - grouped))


@pytest.mark.parametrize(("title", "expression", "legend"), QUERIES)
def test_a_query_asks_for_what_there_is(
    title: str, expression: str, legend: str, metrics: dict[str, set[str]]
):
    assert list(complaints(expression, legend, metrics)) == []
    assert 'dynamo_namespace="$namespace"' in expression, "it shows all graphs together"


def test_every_panel_has_queries_and_the_chosen_data_source():
    assert len(PANELS) > 10
    for panel in PANELS:
        assert panel["targets"] and all(target["expr"].strip() for target in panel["targets"])
        for of in (panel, *panel["targets"]):
            assert of["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_its_variables_choose_data_source_and_namespace(metrics: dict[str, set[str]]):
    source, namespace = DASHBOARD["templating"]["list"]
    assert (source["name"], source["type"]) == ("datasource", "datasource")
    asked = re.fullmatch(r"label_values\((\w+), (\w+)\)", namespace["definition"])
    assert namespace["name"] == "namespace" and asked is not None
    assert asked[2] in metrics[asked[1]]
