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
        yield _counter("dynamo_lite_forward_answers", text, ("how", "reason"), stats.answered)
        text = "Legs that failed before the client had a byte"
        yield _counter("dynamo_lite_forward_leg_failures", text, ("leg", "kind"), stats.failures)
        text = "Engines that were chosen, by leg and reason"
        yield _counter("dynamo_lite_forward_choices", text, ("leg", "reason"), self._placer.choices)
        text = "Requests that got an error because no engine answered them"
        refused = {(str(status),): count for status, count in stats.refused.items()}
        yield _counter("dynamo_lite_forward_refused", text, ("status",), refused)
        yield _counter(
            "dynamo_lite_forward_broken", "Answers that broke off", (), {(): stats.broken}
        )
        text = "Clients that disconnected before the end of their answer"
        yield _counter("dynamo_lite_forward_clients_gone", text, (), {(): stats.gone})
        text = "Fields of clients' bodies that only a forwarder may set"
        yield _counter("dynamo_lite_forward_removed_fields", text, (), {(): stats.removed_fields})
        yield _gauge(
            "dynamo_lite_forward_requests", "Requests in flight", (), {(): stats.in_flight}
        )
        which = ("engine", "role")
        usable = {(e.name, e.options.role): e.usable for e in engines}
        yield _gauge(
            "dynamo_lite_forward_engine_usable", "1 while the engine gets legs", which, usable
        )
        legs = {(e.name, e.options.role): e.legs for e in engines}
        yield _gauge(
            "dynamo_lite_forward_engine_legs", "Legs of this process at the engine", which, legs
        )
        reasons = Counter((why.reason,) for why in self._engines.unused.values())
        reasons[("model",)] = sum(e.healthy and bool(e.trouble) for e in engines)
        text = "Engines that are known and not used, by reason"
        yield _gauge("dynamo_lite_forward_unused_engines", text, ("reason",), reasons)


_Values = Mapping[tuple[str, ...], int]


def _counter(name: str, text: str, labels: tuple[str, ...], values: _Values) -> Metric:
    """values: by the labels' values."""
    return _filled(CounterMetricFamily(name, text, labels=labels), values)


def _gauge(name: str, text: str, labels: tuple[str, ...], values: _Values) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=labels), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: _Values) -> Metric:
    for labels, value in values.items():
        family.add_metric(list(labels), value)
    return family
