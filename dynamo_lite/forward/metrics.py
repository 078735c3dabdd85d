"""The metrics of a Forwarder or a sidecar."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dynamo_lite.forward.engines import KnownEngines
from dynamo_lite.forward.placing import Placer


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


#: By the labels' values.
_Values = Mapping[tuple[str, ...], int]
#: Name, text and labels of a metric.
_Row = tuple[str, str, tuple[str, ...], _Values]


class ForwardMetrics(Collector):
    """Reads the counts from their owners."""

    def __init__(self, stats: ForwardStats, placer: Placer, engines: KnownEngines):
        self._stats, self._placer, self._engines = stats, placer, engines

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        for name, text, labels, values in self._counts():
            yield _filled(CounterMetricFamily(name, text, labels=labels), values)
        for name, text, labels, values in self._states():
            yield _filled(GaugeMetricFamily(name, text, labels=labels), values)

    def _counts(self) -> Iterable[_Row]:
        stats = self._stats
        text = "Answers that were begun: with a prefill leg, without one (and why), passed on"
        yield "dynamo_lite_forward_answers", text, ("how", "reason"), stats.answered
        text = "Legs that failed before the client had a byte"
        yield "dynamo_lite_forward_leg_failures", text, ("leg", "kind"), stats.failures
        text = "Engines that were chosen, by leg and reason"
        yield "dynamo_lite_forward_choices", text, ("leg", "reason"), self._placer.choices
        text = "Requests that got an error because no engine answered them"
        refused = {(str(status),): count for status, count in stats.refused.items()}
        yield "dynamo_lite_forward_refused", text, ("status",), refused
        yield "dynamo_lite_forward_broken", "Answers that broke off", (), {(): stats.broken}
        text = "Clients that disconnected before the end of their answer"
        yield "dynamo_lite_forward_clients_gone", text, (), {(): stats.gone}
        text = "Fields of clients' bodies that only a forwarder may set"
        yield "dynamo_lite_forward_removed_fields", text, (), {(): stats.removed_fields}

    def _states(self) -> Iterable[_Row]:
        yield "dynamo_lite_forward_requests", "Requests in flight", (), {(): self._stats.in_flight}
        which, engines = (
            ("engine", "role"),
            {(e.name, e.options.role): e for e in self._engines.all},
        )
        usable = {labels: engine.usable for labels, engine in engines.items()}
        yield "dynamo_lite_forward_engine_usable", "1 while the engine gets legs", which, usable
        legs = {labels: engine.legs for labels, engine in engines.items()}
        yield "dynamo_lite_forward_engine_legs", "Legs of this process at the engine", which, legs
        reasons = Counter((why.reason,) for why in self._engines.unused.values())
        reasons[("model",)] = sum(e.healthy and bool(e.trouble) for e in engines.values())
        text = "Engines that are known and not used, by reason"
        yield "dynamo_lite_forward_unused_engines", text, ("reason",), reasons


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: _Values) -> Metric:
    for labels, value in values.items():
        family.add_metric(list(labels), value)
    return family
