"""The metrics of a Forwarder or a sidecar."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dynamo_lite.forward.health import KnownEngines
from dynamo_lite.forward.placing import Placer


@dataclass(slots=True)
class ForwardStats:
    """Counts since the start."""

    #: Answers by how (`disaggregated`, `alone`, `passed`) and why.
    answered: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    #: Failed legs by leg and kind.
    failures: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    #: Errors that the client got, by status, but for 4xx of engines, which are passed on.
    refused: Counter[int] = field(default_factory=Counter[int])
    #: Requests by how they ended, as in `ForwardDecision.outcome`.
    ended: Counter[str] = field(default_factory=Counter[str])
    in_flight: int = 0


#: By the labels' values.
_Values = Mapping[tuple[str, ...], int]
#: Name, text and labels of a metric.
_Row = tuple[str, str, tuple[str, ...], _Values]


class ForwardMetrics(Collector):
    """Reads the counts from their owners."""

    def __init__(self, stats: ForwardStats, placer: Placer, engines: KnownEngines):
        self._stats, self._placer, self._engines = stats, placer, engines

    def collect(self) -> Iterable[Metric]:
        for name, text, labels, values in self._counts():
            yield _filled(CounterMetricFamily(name, text, labels=labels), values)
        for name, text, labels, values in self._states():
            yield _filled(GaugeMetricFamily(name, text, labels=labels), values)

    def _counts(self) -> Sequence[_Row]:
        stats = self._stats
        begun = "Answers that were begun: with a prefill leg, without one (and why), passed on"
        refused = {(str(status),): count for status, count in stats.refused.items()}
        failed = "Requests that got an error because no engine answered them"
        how, ended = "How requests ended", {(way,): n for way, n in stats.ended.items()}
        chosen, choices = "Engines that were chosen, by leg and reason", self._placer.choices
        legs = "Legs that failed before the client had a byte"
        return (
            ("dynamo_lite_forward_answers", begun, ("how", "reason"), stats.answered),
            ("dynamo_lite_forward_leg_failures", legs, ("leg", "kind"), stats.failures),
            ("dynamo_lite_forward_choices", chosen, ("leg", "reason"), choices),
            ("dynamo_lite_forward_refused", failed, ("status",), refused),
            ("dynamo_lite_forward_requests_ended", how, ("outcome",), ended),
        )

    def _states(self) -> Sequence[_Row]:
        engines = {(engine.name, engine.options.role): engine for engine in self._engines.all}
        usable = {labels: engine.usable for labels, engine in engines.items()}
        loads = self._engines.loads
        legs = {labels: loads.own(engine.number).requests for labels, engine in engines.items()}
        misfits = sum(engine.healthy and bool(engine.trouble) for engine in engines.values())
        unused = {(): len(self._engines.unused) + misfits}
        which = ("engine", "role")
        return (
            ("dynamo_lite_forward_requests", "Requests in flight", (), {(): self._stats.in_flight}),
            ("dynamo_lite_forward_engine_usable", "1 while the engine gets legs", which, usable),
            ("dynamo_lite_forward_engine_legs", "Legs of this process at the engine", which, legs),
            ("dynamo_lite_forward_unused_engines", "Engines that do not fit", (), unused),
        )


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: _Values) -> Metric:
    for labels, value in values.items():
        family.add_metric(list(labels), value)
    return family
