"""A decode worker: admission, the decision for each prompt, and an engine."""

from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

from dynamo_lite.capacity.engine import EngineModel
from dynamo_lite.capacity.events import Events
from dynamo_lite.capacity.histogram import Histogram
from dynamo_lite.capacity.jobs import BacklogView, JobModel
from dynamo_lite.capacity.kv_pool import KvPool
from dynamo_lite.capacity.options import GraphModelOptions
from dynamo_lite.capacity.prefill_worker import Nic
from dynamo_lite.capacity.request import TraceRequest
from dynamo_lite.capacity.sequence import Sequence
from dynamo_lite.capacity.steal_back import StealBackModel
from dynamo_lite.capacity.timing import Timing
from dynamo_lite.policy.decision.disagg import (
    WANT_OF_ROOM,
    DecisionReason,
    Local,
    Remote,
    Verdict,
    decide,
)
from dynamo_lite.policy.routing.admission import Admission, Busy
from dynamo_lite.policy.routing.kv_chain import ChainHash
from dynamo_lite.policy.routing.kv_routing import LoadReport
from dynamo_lite.policy.scaling.drain import RunningRequest
from dynamo_lite.protocol.backlog import Lane
from dynamo_lite.protocol.decisions import DecisionInputs

#: Reasons for which a prompt is computed here although it should not be.
_WANTS_PREFILL = WANT_OF_ROOM | {DecisionReason.NO_PREFILL_WORKER}


class DecodeTally:
    """Counts over all decode workers."""

    def __init__(self) -> None:
        self.decisions: Counter[tuple[str, str]] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.gaps = Histogram()
        #: Output tokens of the requests that have ended.
        self.answers = Histogram()
        self.prompt_tokens = self.cached_tokens = 0
        #: Uncached tokens of remote prefills, and of prefills that were local because prefill
        #: workers were missing.
        self.remote_tokens = self.unserved_tokens = 0


class RequestListener(Protocol):
    """The receiver of a request's events."""

    def answered(self, sequence: Sequence) -> None:
        """The client has the first token."""
        ...

    def ended(self, worker: "DecodeWorkerModel", sequence: Sequence) -> None: ...


class DecodeWorkerModel:
    """lease_id: its name. phase_s: when its load is reported first. on_change: called when its
    load differs from its last report, once per report, with the time of the next report."""

    def __init__(
        self,
        lease_id: int,
        timing: Timing,
        options: GraphModelOptions,
        events: Events,
        backlog: BacklogView,
        tally: DecodeTally,
        listener: RequestListener,
        *,
        phase_s: float,
        on_stored: Callable[[list[ChainHash]], None],
        on_removed: Callable[[list[ChainHash]], None],
        on_change: Callable[[float], None],
    ):
        self.lease_id, self.leaving, self.nic = lease_id, False, Nic()
        self._options, self._events, self._backlog = options, events, backlog
        self._tally, self._listener, self._transfer = tally, listener, timing.transfer
        self._admission = Admission(options.worker_limits)
        self._asked: deque[tuple[float, Lane, int]] = deque()
        self._report, self._next_report_s = LoadReport(0, 0, 0.0), phase_s
        self._on_change, self._changed = on_change, False
        self.parked_tokens = 0
        self.engine = EngineModel(
            timing.step,
            timing.engine,
            KvPool(
                timing.engine.kv_tokens,
                options.block_tokens,
                on_stored=on_stored,
                on_removed=on_removed,
            ),
            options.block_tokens,
            events,
            admit=self._admit,
            on_computed=self._answered,
            on_end=self._ended,
            gaps=tally.gaps,
        )

        self._steals: StealBackModel | None = None
        if options.steal_back:
            self._steals = StealBackModel(
                str(lease_id),
                timing,
                events,
                self.engine,
                backlog,
                lambda lane: backlog.view(lane, self._asked),
                lambda job: self._computes(job, "taken_back"),
            )

    @property
    def in_flight(self) -> int:
        return self._admission.in_flight

    @property
    def running(self) -> int:
        return len(self.engine.running)

    def unfinished(self) -> list[RunningRequest]:
        """Its requests. What they have generated does not matter: their length is not known."""
        return [RunningRequest(prompt_tokens=0, output_tokens=0, limit_tokens=None, how="stay")] * (
            self.in_flight
        )

    def load(self) -> LoadReport:
        """Its last report."""
        self._report_if_due()
        return self._report

    def submit(self, name: str, request: TraceRequest) -> Busy | None:
        """Returns None if the worker took the request."""
        self._changes()
        said = self._admission.enter(name, request.prompt_tokens)
        if isinstance(said, Busy):
            return said
        self.engine.add(Sequence(request, request.prompt_tokens, request.output_tokens, note=name))
        return None

    def received(self, job: JobModel) -> None:
        """The KV of a remote prefill is here."""
        self.parked_tokens -= job.sequence.context
        self._tally.outcomes["committed"] += 1
        self.engine.arrived(job.sequence)

    def first_token(self, job: JobModel) -> None:
        """The prefill worker has sent the first token."""
        job.sequence.first_at = self._events.now
        self._answered(job.sequence)

    def _admit(self, sequence: Sequence, cached: int) -> bool:
        if sequence.first_at is not None or sequence.left < sequence.request.output_tokens:
            return True  # preempted: computed again here
        tokens = sequence.context - cached
        lane = self._backlog.queue.lane_of(tokens)
        verdict = self._decide(sequence, cached, lane)
        side = "remote" if isinstance(verdict, Remote) else "local"
        self._tally.decisions[side, verdict.reason.value] += 1
        self._tally.prompt_tokens += sequence.context
        self._tally.cached_tokens += cached
        if isinstance(verdict, Local):
            if verdict.reason in _WANTS_PREFILL:
                self._tally.unserved_tokens += tokens
            return True
        self._tally.remote_tokens += tokens
        job = JobModel(sequence, self, lane, cached, tokens)
        now = self._events.now
        if self._steals is not None:
            self._steals.asks(job)
        self._asked.append((now, lane, tokens))
        self.parked_tokens += sequence.context
        self._events.at(now + self._transfer.handover_s, self._push, job)
        timeout_s = self._options.thresholds.remote_prefill_timeout_s
        self._events.at(now + timeout_s, self._too_late, job)
        return False

    def _decide(self, sequence: Sequence, cached: int, lane: Lane) -> Verdict:
        thresholds = self._options.thresholds
        inputs = DecisionInputs(
            prompt_tokens=sequence.context,
            cached_tokens=cached,
            queue=self._backlog.view(lane, self._asked),
            time_left_s=thresholds.remote_prefill_timeout_s,
            leaving=self.leaving,
        )
        return decide(inputs, thresholds)

    def _push(self, job: JobModel) -> None:
        if not self._backlog.queue.push(job):
            job.ended = True
            self._computes(job, "queue_full")

    def _too_late(self, job: JobModel) -> None:
        if not job.ended:
            self._backlog.queue.withdraw(job)
            self._computes(job, "timed_out")

    def _computes(self, job: JobModel, outcome: str) -> None:
        self.parked_tokens -= job.sequence.context
        self._tally.outcomes[outcome] += 1
        self._tally.unserved_tokens += job.tokens
        self.engine.compute(job.sequence)

    def _answered(self, sequence: Sequence) -> None:
        self._changes()
        self._admission.answered(str(sequence.note))
        self._listener.answered(sequence)

    def _ended(self, sequence: Sequence) -> None:
        self._changes()
        self._admission.leave(str(sequence.note))
        self._tally.answers.add(sequence.request.output_tokens)
        self._listener.ended(self, sequence)

    def _changes(self) -> None:
        """Called before its load changes."""
        self._report_if_due()
        if not self._changed:
            self._changed = True
            self._on_change(self._next_report_s)

    def _report_if_due(self) -> None:
        """Its load does not change between two calls, so a due report is made now."""
        now = self._events.now
        if now >= self._next_report_s:
            self._report = LoadReport(
                self._admission.in_flight, self._admission.waiting_tokens, self.engine.pool.usage
            )
            self._changed = False
            period = self._options.load_period_s
            self._next_report_s += period * ((now - self._next_report_s) // period + 1)
