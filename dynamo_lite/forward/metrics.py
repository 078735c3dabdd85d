"""The metrics of a Forwarder or a sidecar."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dynamo_lite.forward.engines import KnownEngines
from dynamo_lite.forward.placing import Places


@dataclass(slots=True)
class ForwardStats:
    """Counts since the start."""

    #: Answers by how (`disaggregated`, `alone`, `passed`) and why.
    answered: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    #: Failed legs by leg and kind.
    failures: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    #: Errors that the client got, by status, without errors of engines that are passed on.
    refused: Counter[int] = field(default_factory=Counter[int])
    #: Answers that broke off after their first byte.
    broken: int = 0
    #: Clients that disconnected before the end of their answer.
    gone: int = 0
    #: Fields that clients must not set, and that were removed.
    removed_fields: int = 0
    in_flight: int = 0


class ForwardMetrics(Collector):
    """Reads the counts from their owners."""

    def __init__(self, stats: ForwardStats, placer: Places, engines: KnownEngines):
        self._stats, self._placer, self._engines = stats, placer, engines

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        stats, engines = self._stats, self._engines.all
        text = "Answers that were begun: with a prefill leg, without one (and why), passed on"
        answers = CounterMetricFamily("dynamo_lite_forward_answers", text, labels=("how", "reason"))
        yield _filled(answers, stats.answered)
        text = "Legs that failed before the client had a byte"
        failed = CounterMetricFamily(
            "dynamo_lite_forward_leg_failures", text, labels=("leg", "kind")
        )
        yield _filled(failed, stats.failures)
        text = "Engines that were chosen, by leg and reason"
        chosen = CounterMetricFamily("dynamo_lite_forward_choices", text, labels=("leg", "reason"))
        yield _filled(chosen, self._placer.choices)
        text = "Requests that got an error because no engine answered them"
        refused = CounterMetricFamily("dynamo_lite_forward_refused", text, labels=("status",))
        yield _filled(refused, {(str(status),): count for status, count in stats.refused.items()})
        yield CounterMetricFamily(
            "dynamo_lite_forward_broken", "Answers that broke off", value=stats.broken
        )
        yield CounterMetricFamily(
            "dynamo_lite_forward_clients_gone",
            "Clients that disconnected before the end of their answer",
            value=stats.gone,
        )
        yield CounterMetricFamily(
            "dynamo_lite_forward_removed_fields",
            "Fields of clients' bodies that only a forwarder may set",
            value=stats.removed_fields,
        )
        yield GaugeMetricFamily(
            "dynamo_lite_forward_requests", "Requests in flight", value=stats.in_flight
        )
        which = ("engine", "role")
        text = "1 while the engine gets legs"
        usable = GaugeMetricFamily("dynamo_lite_forward_engine_usable", text, labels=which)
        yield _filled(usable, {(e.name, e.options.role): e.usable for e in engines})
        text = "Legs of this process at the engine"
        legs = GaugeMetricFamily("dynamo_lite_forward_engine_legs", text, labels=which)
        yield _filled(legs, {(e.name, e.options.role): e.legs for e in engines})
        text = "Engines that are known and not used, by reason"
        unused = GaugeMetricFamily("dynamo_lite_forward_unused_engines", text, labels=("reason",))
        reasons = Counter((why.reason,) for why in self._engines.unused.values())
        reasons[("model",)] = sum(e.healthy and bool(e.trouble) for e in engines)
        yield _filled(unused, reasons)


def _filled(
    family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[tuple[str, ...], int]
) -> Metric:
    """values: by the labels' values."""
    for labels, value in values.items():
        family.add_metric(list(labels), value)
    return family
