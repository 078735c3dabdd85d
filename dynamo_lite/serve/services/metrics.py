"""Prometheus metrics of the services: requests, the router's choices, engines, the queue."""

from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dynamo_lite.request_plane.admission import Admission
from dynamo_lite.request_plane.failover import FailoverStats
from dynamo_lite.routing.kv_routing import REASONS, KvPicker

_HOW = ("fresh", "continue", "replay")
_REFUSALS = ("limit", "busy", "no_worker", "late", "rejected")

#: Name, help, and the field of `EngineStatus`.
GaugeTable = Iterable[tuple[str, str, str]]
BLOCK_GAUGES = (
    ("dynamo_lite_kv_blocks_free", "KV blocks that a new request may take", "free_blocks"),
    ("dynamo_lite_kv_blocks_total", "KV blocks of the engine", "total_blocks"),
)
DECODE_GAUGES = (
    *BLOCK_GAUGES,
    (
        "dynamo_lite_quarantined_attempts",
        "Withdrawn remote prefills whose blocks a writer may still touch",
        "quarantined",
    ),
    (
        "dynamo_lite_prefill_queue_depth",
        "Jobs on the prefill queue, waiting and in flight",
        "queue_jobs",
    ),
    (
        "dynamo_lite_prefill_queue_tokens",
        "Prompt tokens to compute of these jobs, estimated from their size",
        "queue_tokens",
    ),
    (
        "dynamo_lite_prefill_outstanding_jobs",
        "Remote prefills that this worker's requests wait for",
        "waiting",
    ),
    (
        "dynamo_lite_prefill_outstanding_tokens",
        "Prompt tokens that prefill workers have to compute for them",
        "waiting_tokens",
    ),
    (
        "dynamo_lite_prefill_workers_unresponsive",
        "Prefill workers that are registered, but unresponsive or unhealthy",
        "unresponsive_writers",
    ),
    (
        "dynamo_lite_prefill_workers_unusable",
        "Prefill workers that respond, but whose link to this engine has failed",
        "unusable_writers",
    ),
)


class RequestMetrics(Collector):
    """Reads the counts from their owners. Requests are sequences: `n` of them for n > 1."""

    def __init__(self, stats: FailoverStats, refused: Counter[str], admission: Admission):
        self._stats, self._refused, self._admission = stats, refused, admission

    def collect(self) -> Iterable[Metric]:
        yield _counts(
            "dynamo_lite_requests_moved",
            "Requests that migrated to another worker: from their start, continued, replayed",
            "how",
            {how: self._stats.moved[how] for how in _HOW},
        )
        yield _counts(
            "dynamo_lite_requests_refused",
            "Requests that were sent to no worker, or that no worker accepted",
            "reason",
            {reason: self._refused[reason] for reason in _REFUSALS},
        )
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
    def __init__(self, picker: KvPicker):
        self._picker = picker

    def collect(self) -> Iterable[Metric]:
        yield _counts(
            "dynamo_lite_router_choices",
            "Workers that were chosen: the only one; the session's last; for the prompt's"
            " prefix; by load, if none holds any of it; for balance, if those that hold"
            " more are too busy",
            "reason",
            {reason: self._picker.choices[reason] for reason in REASONS},
        )
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


def _counts(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family
