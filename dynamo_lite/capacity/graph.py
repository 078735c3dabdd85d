"""The simulated graph: Frontend, router, workers of both roles, queue."""

from collections.abc import Callable

from dynamo_lite.capacity.decode_worker import DecodeTally, DecodeWorkerModel
from dynamo_lite.capacity.events import Events
from dynamo_lite.capacity.fleet import RoleFleet, phases
from dynamo_lite.capacity.jobs import BacklogView, JobModel
from dynamo_lite.capacity.options import GraphModelOptions, WorkerCounts
from dynamo_lite.capacity.prefill_worker import PrefillWorkerModel
from dynamo_lite.capacity.records import Records
from dynamo_lite.capacity.request import TraceRequest
from dynamo_lite.capacity.routing import make_router
from dynamo_lite.capacity.sequence import Sequence
from dynamo_lite.capacity.timing import Timing
from dynamo_lite.policy.routing.admission import Admission, Busy
from dynamo_lite.policy.scaling.drain import Pace, busy_s

#: How many workers a request is offered to.
_TRIES = 3


class GraphModel:
    """Takes requests, and writes their results into `records`."""

    def __init__(
        self,
        timing: Timing,
        options: GraphModelOptions,
        events: Events,
        records: Records,
        *,
        start_s: float,
        shares_prefixes: bool,
    ):
        self._timing, self._options, self._events = timing, options, events
        self._records = records
        self.tally = DecodeTally()
        self.backlog = BacklogView(options, lambda: events.now)
        self._admission = Admission(options.frontend_limits)
        self.router = make_router(options, events, shares_prefixes=shares_prefixes)
        self._phase = phases(options.seed, options.load_period_s)
        self._leases = 0
        self.prefill = RoleFleet[PrefillWorkerModel](
            events,
            start_s=start_s,
            make=self._make_prefill,
            stop=self._stop_prefill,
            busy_s=self._prefill_busy_s,
        )
        self.decode = RoleFleet[DecodeWorkerModel](
            events,
            start_s=start_s,
            make=self._make_decode,
            stop=self._stop_decode,
            busy_s=lambda worker: busy_s(worker.unfinished(), self._pace()),
        )

    @property
    def in_flight(self) -> int:
        return self._admission.in_flight

    def begin(self, counts: WorkerCounts) -> None:
        self.prefill.begin(counts.prefill)
        self.decode.begin(counts.decode)

    def want(self, counts: WorkerCounts, most: int) -> None:
        """Starts and stops workers; at most `most` are there at a time."""
        for fleet, count in ((self.prefill, counts.prefill), (self.decode, counts.decode)):
            fleet.want(count, most - self.prefill.devices - self.decode.devices)

    def submit(self, number: int, request: TraceRequest) -> None:
        name = str(number)
        if isinstance(self._admission.enter(name, request.prompt_tokens), Busy):
            self._records.refuse()
            return
        limits = self._timing.engine
        tried: list[int] = []
        fits = request.prompt_tokens + request.output_tokens <= limits.kv_tokens
        while fits and len(tried) < _TRIES:
            worker = self.router.pick(name, request, tried)
            if worker is None:
                break
            if worker.submit(name, request) is None:
                return
            self.router.released(name)
            tried.append(worker.lease_id)
        self._admission.leave(name)
        self._records.refuse()

    def answered(self, sequence: Sequence) -> None:
        """See `decode_worker.RequestListener`."""
        name = str(sequence.note)
        self._admission.answered(name)
        self.router.answered(name)
        at = self._events.now + self._timing.frontend_s
        self._records.answered(int(name), sequence.request, at)

    def ended(self, worker: DecodeWorkerModel, sequence: Sequence) -> None:
        """See `decode_worker.RequestListener`."""
        name = str(sequence.note)
        self._admission.leave(name)
        self.router.released(name)
        frontend_s = self._timing.frontend_s
        self._records.ended(int(name), sequence.request, self._events.now, frontend_s)
        if worker.leaving and not worker.in_flight:
            self.decode.gone(worker)

    def _prefill_busy_s(self, worker: PrefillWorkerModel) -> float:
        """Without a measured rate the tokens are returned, which give the same order as
        seconds."""
        rate = self.backlog.drain.tokens_per_s(self._events.now)
        return worker.claimed_tokens / (rate or 1.0)

    def _pace(self) -> Pace:
        """The pace of the answers so far. Requests are not moved here, so the cost of a prefill
        is left out."""
        tally = self.tally
        usual = tally.answers.percentile(0.9)
        return Pace(
            token_s=tally.gaps.mean_s or 0.0, output_tokens=0 if usual is None else round(usual)
        )

    def _first_from_prefill(self, job: JobModel) -> None:
        job.decode.first_token(job)

    def _make_prefill(self) -> PrefillWorkerModel:
        worker = PrefillWorkerModel(
            self._timing,
            self._options,
            self._events,
            self.backlog.queue,
            on_first=self._first_from_prefill,
            on_idle=self.prefill.gone,
        )
        self.backlog.workers += 1
        worker.start()
        return worker

    def _stop_prefill(self, worker: PrefillWorkerModel) -> None:
        worker.leaving = True
        self.backlog.workers -= 1
        if not worker.jobs:
            self.prefill.gone(worker)

    def _make_decode(self) -> DecodeWorkerModel:
        self._leases += 1
        lease_id = self._leases
        worker = DecodeWorkerModel(
            lease_id,
            self._timing,
            self._options,
            self._events,
            self.backlog,
            self.tally,
            self,
            phase_s=self._events.now + self._phase(),
            on_stored=_bound(self.router.stored, lease_id),
            on_removed=_bound(self.router.removed, lease_id),
            on_change=lambda due_s: self.router.changes(lease_id, due_s),
        )
        self.router.join(worker)
        return worker

    def _stop_decode(self, worker: DecodeWorkerModel) -> None:
        worker.leaving = True
        self.router.leave(worker)
        if not worker.in_flight:
            self.decode.gone(worker)


def _bound(call: Callable[[int, list[int]], None], lease_id: int) -> Callable[[list[int]], None]:
    return lambda hashes: call(lease_id, hashes)
