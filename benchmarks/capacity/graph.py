"""The simulated graph: router, workers of both roles, queue."""

import math
from array import array
from dataclasses import dataclass

from benchmarks.capacity.decode import DecodeWorkerModel, Tally
from benchmarks.capacity.events import Events
from benchmarks.capacity.fleet import RoleFleet, WorkerCounts
from benchmarks.capacity.load import Request
from benchmarks.capacity.phase import Sequence
from benchmarks.capacity.prefill import PrefillWorkerModel
from benchmarks.capacity.queue import JobQueue
from benchmarks.capacity.router import Router
from benchmarks.capacity.timing import Timing
from dynamo_lite.protocol.options import DisaggOptions

#: How many workers a request is offered to.
_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class Slo:
    """The targets that a request meets or misses, in seconds."""

    ttft_s: float
    #: Mean time between the tokens of the request.
    itl_s: float


class Records:
    """What happened to each request, by its number. Seconds since its arrival; NaN: it never got
    there."""

    def __init__(self, requests: list[Request]):
        self.requests = requests
        self.ttft_s = array("d", [math.nan]) * len(requests)
        self.total_s = array("d", [math.nan]) * len(requests)
        self.refused = self.completed = 0

    def attained(self, slo: Slo) -> float:
        """Share of the requests whose first token, and the others, came in time. A request that has
        not completed misses both."""
        met = sum(self._meets(number, slo) for number in range(len(self.requests)))
        return met / max(len(self.requests), 1)

    def _meets(self, number: int, slo: Slo) -> bool:
        ttft_s, gaps = self.ttft_s[number], self.requests[number].output_tokens - 1
        itl_s = max(self.total_s[number] - ttft_s, 0.0) / gaps if gaps else 0.0
        return not math.isnan(self.total_s[number]) and ttft_s <= slo.ttft_s and itl_s <= slo.itl_s


class GraphModel:
    """Takes requests, and writes what happens to them into `records`. counts: the workers at the
    beginning."""

    def __init__(
        self,
        timing: Timing,
        thresholds: DisaggOptions,
        events: Events,
        records: Records,
        counts: WorkerCounts,
        *,
        start_s: float,
        seed: int,
    ):
        self.timing, self._thresholds, self._events = timing, thresholds, events
        self.records = records
        self.tally = Tally()
        self.queue = JobQueue()
        self._router = Router(events, seed)
        self._leases = 0
        self.prefill = RoleFleet[PrefillWorkerModel](
            events,
            count=counts.prefill,
            start_s=start_s,
            make=self._make_prefill,
            on_leave=self._prefill_leaves,
        )
        self.decode = RoleFleet[DecodeWorkerModel](
            events,
            count=counts.decode,
            start_s=start_s,
            make=self._make_decode,
            on_leave=self._router.leave,
        )

    def device_seconds(self) -> float:
        return self.prefill.device_seconds() + self.decode.device_seconds()

    def want(self, counts: WorkerCounts, most: int) -> None:
        """Starts and stops workers; at most `most` are there at a time."""
        for fleet, count in ((self.prefill, counts.prefill), (self.decode, counts.decode)):
            fleet.want(count, most - self.prefill.devices - self.decode.devices)

    def submit(self, number: int) -> None:
        request = self.records.requests[number]
        tried: set[int] = set()
        fits = request.prompt_tokens + request.output_tokens <= self.timing.kv_tokens
        while fits and len(tried) < _TRIES:
            worker = self._router.pick(number, request, tried)
            if worker is None:
                break
            if worker.submit(number, request):
                return
            self._router.released(number)
            tried.add(worker.lease_id)
        self.records.refused += 1
        self._stop_after_the_last()

    def _answered(self, sequence: Sequence) -> None:
        number = _number(sequence)
        self._router.answered(number)
        assert math.isnan(self.records.ttft_s[number]), f"request {number} has two first tokens"
        self.records.ttft_s[number] = self._since_arrival(sequence)

    def _ended(self, worker: DecodeWorkerModel, sequence: Sequence) -> None:
        number = _number(sequence)
        self._router.released(number)
        assert math.isnan(self.records.total_s[number]), f"request {number} has ended twice"
        self.records.total_s[number] = self._since_arrival(sequence)
        self.records.completed += 1
        self._stop_after_the_last()
        self.decode.check_gone(worker)

    def _since_arrival(self, sequence: Sequence) -> float:
        return self._events.now + self.timing.frontend_s - sequence.request.arrival_s

    def _stop_after_the_last(self) -> None:
        records = self.records
        if records.completed + records.refused == len(records.requests):
            self._events.stop()

    def _make_prefill(self) -> PrefillWorkerModel:
        self.queue.workers += 1
        return PrefillWorkerModel(
            self.timing,
            self._events,
            self.queue,
            self.tally,
            lambda one: self.prefill.check_gone(one),
        )

    def _prefill_leaves(self, _: PrefillWorkerModel) -> None:
        self.queue.workers -= 1

    def _make_decode(self) -> DecodeWorkerModel:
        self._leases += 1
        worker = DecodeWorkerModel(
            self._leases,
            self.timing,
            self._thresholds,
            self._events,
            self.queue,
            self.tally,
            self._answered,
            self._ended,
        )
        self._router.join(worker)
        return worker


def _number(sequence: Sequence) -> int:
    assert isinstance(sequence.note, int)
    return sequence.note
