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
        refused = {(str(status),): number for status, number in stats.refused.items()}
        ended = {(how,): number for how, number in stats.ended.items()}
        count, gauge = partial(_family, CounterMetricFamily), partial(_family, GaugeMetricFamily)
        why, leg, chosen = ("how", "reason"), ("leg", "kind"), ("leg", "reason")
        yield count("dynamo_lite_forward_answers", "Answers that were begun", why, stats.answered)
        yield count("dynamo_lite_forward_leg_failures", "Legs that failed", leg, stats.failures)
        choices = self._placer.choices
        yield count("dynamo_lite_forward_choices", "Engines that were chosen", chosen, choices)
        yield count("dynamo_lite_forward_refused", "Refused requests", ("status",), refused)
        yield count("dynamo_lite_forward_requests_ended", "How they ended", ("outcome",), ended)

        engines = {(engine.name, engine.options.role): engine for engine in self._engines.all}
        which = ("engine", "role")
        usable = {labels: engine.usable for labels, engine in engines.items()}
        legs = {labels: loads.own(engine.number).requests for labels, engine in engines.items()}
        misfits = sum(engine.healthy and bool(engine.trouble) for engine in engines.values())
        unused = {(): len(self._engines.unused) + misfits}
        in_flight = {(): stats.in_flight}
        yield gauge("dynamo_lite_forward_requests", "Requests in flight", (), in_flight)
        yield gauge("dynamo_lite_forward_engine_usable", "1: it gets legs", which, usable)
        yield gauge("dynamo_lite_forward_engine_legs", "Its open legs from here", which, legs)
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
