"""The metrics of a Forwarder or a sidecar."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

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


class ForwardMetrics(Collector):
    """Reads the counts from their owners."""

    def __init__(self, stats: ForwardStats, placer: Placer, engines: KnownEngines):
        self._stats, self._placer, self._engines = stats, placer, engines

    def collect(self) -> Iterable[Metric]:
        stats, loads = self._stats, self._engines.loads
        count, gauge = partial(_family, CounterMetricFamily), partial(_family, GaugeMetricFamily)
        text = "Answers that were begun: with a prefill leg, without one (and why), passed on"
        yield count("dynamo_lite_forward_answers", text, ("how", "reason"), stats.answered)
        text = "Legs that failed before the client had a byte"
        yield count("dynamo_lite_forward_leg_failures", text, ("leg", "kind"), stats.failures)
        text = "Engines that were chosen, by leg and reason"
        yield count("dynamo_lite_forward_choices", text, ("leg", "reason"), self._placer.choices)
        text = "Requests that got an error because no engine answered them"
        refused = {(str(status),): number for status, number in stats.refused.items()}
        yield count("dynamo_lite_forward_refused", text, ("status",), refused)
        ended = {(how,): number for how, number in stats.ended.items()}
        yield count("dynamo_lite_forward_requests_ended", "How requests ended", ("outcome",), ended)

        in_flight = {(): stats.in_flight}
        yield gauge("dynamo_lite_forward_requests", "Requests in flight", (), in_flight)
        engines = {(engine.name, engine.options.role): engine for engine in self._engines.all}
        usable = {labels: engine.usable for labels, engine in engines.items()}
        text, which = "1 while the engine gets legs", ("engine", "role")
        yield gauge("dynamo_lite_forward_engine_usable", text, which, usable)
        legs = {labels: loads.own(engine.number).requests for labels, engine in engines.items()}
        text = "Legs of this process at the engine"
        yield gauge("dynamo_lite_forward_engine_legs", text, which, legs)
        misfits = sum(engine.healthy and bool(engine.trouble) for engine in engines.values())
        unused = {(): len(self._engines.unused) + misfits}
        yield gauge("dynamo_lite_forward_unused_engines", "Engines that do not fit", (), unused)


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    text: str,
    labels: tuple[str, ...],
    values: Mapping[tuple[str, ...], int],
) -> Metric:
    """values: by the labels' values."""
    family = kind(name, text, labels=labels)
    for each, value in values.items():
        family.add_metric(list(each), value)
    return family
