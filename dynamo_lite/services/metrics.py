"""What became of the Frontend's requests, as Prometheus metrics."""

from collections import Counter
from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dynamo_lite.policy.admission import Admission
from dynamo_lite.policy.kv_routing import REASONS, KvPicker
from dynamo_lite.request_plane import FailoverStats

_HOW = ("fresh", "continue", "replay")
_REFUSALS = ("limit", "busy", "no_worker", "late", "rejected")


class RequestMetrics(Collector):
    """Reads the counts where they are kept. Requests are sequences: `n` of them for n > 1."""

    def __init__(self, stats: FailoverStats, refused: Counter[str], admission: Admission):
        self._stats, self._refused, self._admission = stats, refused, admission

    def collect(self) -> Iterable[Metric]:
        moved = CounterMetricFamily(
            "dynamo_lite_requests_moved",
            "Requests that went on with another worker: begun anew, continued, replayed",
            labels=["how"],
        )
        for how in _HOW:
            moved.add_metric([how], self._stats.moved[how])
        refused = CounterMetricFamily(
            "dynamo_lite_requests_refused",
            "Requests that no worker was given, or that none took",
            labels=["reason"],
        )
        for reason in _REFUSALS:
            refused.add_metric([reason], self._refused[reason])
        yield moved
        yield refused
        yield CounterMetricFamily(
            "dynamo_lite_requests_lost",
            "Requests that ended with their worker",
            value=self._stats.lost,
        )
        yield CounterMetricFamily(
            "dynamo_lite_requests_expired",
            "Requests that were stopped because their time was up",
            value=self._stats.expired,
        )
        yield GaugeMetricFamily(
            "dynamo_lite_requests_in_flight",
            "Requests that were taken and have not ended",
            value=self._admission.in_flight,
        )
        yield GaugeMetricFamily(
            "dynamo_lite_prompt_tokens_waiting",
            "Prompt tokens of requests without a first token",
            value=self._admission.waiting_tokens,
        )


class RouterMetrics(Collector):
    """What the KV-aware router has chosen, and why."""

    def __init__(self, picker: KvPicker):
        self._picker = picker

    def collect(self) -> Iterable[Metric]:
        choices = CounterMetricFamily(
            "dynamo_lite_router_choices",
            "Workers that were chosen: the only one; the session's last; for the prompt's"
            " prefix; by load, where nobody holds any of it; for balance, since who holds"
            " more is too busy; by lot",
            labels=["reason"],
        )
        for reason in REASONS:
            choices.add_metric([reason], self._picker.choices[reason])
        yield choices
        yield CounterMetricFamily(
            "dynamo_lite_router_prompt_tokens",
            "Tokens of the prompts that were given to workers",
            value=self._picker.prompt_tokens,
        )
        yield CounterMetricFamily(
            "dynamo_lite_router_matched_tokens",
            "Those of them that the chosen worker held, or was about to hold",
            value=self._picker.matched_tokens,
        )
