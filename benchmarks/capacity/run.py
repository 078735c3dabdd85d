"""One run: a load, a graph, and who chooses its numbers of workers."""

from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.capacity.events import Events
from benchmarks.capacity.fleet import WorkerCounts
from benchmarks.capacity.graph import GraphModel, Records
from benchmarks.capacity.load import Request
from benchmarks.capacity.timing import Timing
from dynamo_lite.protocol.options import DisaggOptions


class Scaler(Protocol):
    """Chooses the numbers of workers, every `tick_s` seconds of simulated time."""

    tick_s: float

    def tick(self, graph: GraphModel, now: float) -> WorkerCounts: ...


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all runs of a comparison share."""

    #: In order of arrival.
    requests: list[Request]
    timing: Timing
    thresholds: DisaggOptions = field(default_factory=DisaggOptions)
    #: Of both roles together, starting and draining ones included.
    most_workers: int
    start_s: float
    seed: int = 0


@dataclass(eq=False)
class Result:
    """changes: times at which other numbers were wanted than before, with the first ones."""

    graph: GraphModel
    changes: list[tuple[float, WorkerCounts]]
    ended_s: float


class Run:
    """counts: the numbers at the beginning. scaler: None: they stay."""

    def __init__(self, setting: Setting, counts: WorkerCounts, scaler: Scaler | None = None):
        self._setting, self._scaler, self._events = setting, scaler, Events()
        self._graph = GraphModel(
            setting.timing,
            setting.thresholds,
            self._events,
            Records(setting.requests),
            counts,
            start_s=setting.start_s,
            seed=setting.seed,
        )
        self._changes = [(0.0, counts)]

    def run(self) -> Result:
        if self._setting.requests:
            self._events.at(self._setting.requests[0].arrival_s, self._arrive, 0)
            if self._scaler is not None:
                self._events.at(0.0, self._tick, self._scaler)
            self._events.run()
        return Result(self._graph, self._changes, self._events.now)

    def _arrive(self, number: int) -> None:
        requests = self._setting.requests
        if number + 1 < len(requests):
            self._events.at(requests[number + 1].arrival_s, self._arrive, number + 1)
        self._graph.submit(number)

    def _tick(self, scaler: Scaler) -> None:
        now = self._events.now
        wanted = scaler.tick(self._graph, now)
        if wanted != self._changes[-1][1]:
            self._changes.append((now, wanted))
        self._graph.want(wanted, self._setting.most_workers)
        self._events.at(now + scaler.tick_s, self._tick, scaler)
