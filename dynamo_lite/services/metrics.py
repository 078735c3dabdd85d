"""Prometheus metrics of the services: the Frontend's requests, the router's choices, the queue."""

from collections import Counter
from collections.abc import Iterable

from prometheus_client import Gauge
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dynamo_lite.policy.admission import Admission
from dynamo_lite.policy.kv_routing import REASONS, KvPicker
from dynamo_lite.request_plane import FailoverStats
from dynamo_lite.runtime.members.backlog import BacklogFollower
from dynamo_lite.runtime.process.host import Host

_HOW = ("fresh", "continue", "replay")
_REFUSALS = ("limit", "busy", "no_worker", "late", "rejected")


class RequestMetrics(Collector):
    """Reads the counts from their owners. Requests are sequences: `n` of them for n > 1."""

    def __init__(self, stats: FailoverStats, refused: Counter[str], admission: Admission):
        self._stats, self._refused, self._admission = stats, refused, admission

    def collect(self) -> Iterable[Metric]:
        moved = CounterMetricFamily(
            "dynamo_lite_requests_moved",
            "Requests that migrated to another worker: from their start, continued, replayed",
            labels=["how"],
        )
        for how in _HOW:
            moved.add_metric([how], self._stats.moved[how])
        refused = CounterMetricFamily(
            "dynamo_lite_requests_refused",
            "Requests that were sent to no worker, or that no worker accepted",
            labels=["reason"],
        )
        for reason in _REFUSALS:
            refused.add_metric([reason], self._refused[reason])
        yield moved
        yield refused
        yield CounterMetricFamily(
            "dynamo_lite_requests_lost",
            "Requests that failed because their worker was lost",
            value=self._stats.lost,
        )
        yield CounterMetricFamily(
            "dynamo_lite_requests_expired",
            "Requests that were stopped by their timeout",
            value=self._stats.expired,
        )
        yield GaugeMetricFamily(
            "dynamo_lite_requests_in_flight",
            "Requests that were accepted and have not ended",
            value=self._admission.in_flight,
        )
        yield GaugeMetricFamily(
            "dynamo_lite_prompt_tokens_waiting",
            "Prompt tokens of requests without a first token",
            value=self._admission.waiting_tokens,
        )


class RouterMetrics(Collector):
    """The choices of the KV-aware router, by reason."""

    def __init__(self, picker: KvPicker):
        self._picker = picker

    def collect(self) -> Iterable[Metric]:
        choices = CounterMetricFamily(
            "dynamo_lite_router_choices",
            "Workers that were chosen: the only one; the session's last; for the prompt's"
            " prefix; by load, if none holds any of it; for balance, if those that hold"
            " more are too busy; at random",
            labels=["reason"],
        )
        for reason in REASONS:
            choices.add_metric([reason], self._picker.choices[reason])
        yield choices
        yield CounterMetricFamily(
            "dynamo_lite_router_prompt_tokens",
            "Prompt tokens of the requests that were placed",
            value=self._picker.prompt_tokens,
        )
        yield CounterMetricFamily(
            "dynamo_lite_router_matched_tokens",
            "Those of them that the chosen workers held, or were about to hold",
            value=self._picker.matched_tokens,
        )


def show_queue_tokens(host: Host, backlog: BacklogFollower) -> None:
    """The prefill queue in tokens; a metric of both kinds of workers."""
    Gauge(
        "dynamo_lite_prefill_queue_tokens",
        "Prompt tokens that decode workers wait for: on the prefill queue, or claimed and not"
        " completely received",
        registry=host.registry,
    ).set_function(lambda: backlog.totals().tokens)
