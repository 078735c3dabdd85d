"""A decode worker: admission, the decision for each prompt, and an engine."""

from collections.abc import Callable

from benchmarks.capacity.engine import EngineModel
from benchmarks.capacity.events import Events
from benchmarks.capacity.histogram import Histogram
from benchmarks.capacity.load import Request
from benchmarks.capacity.phase import Sequence
from benchmarks.capacity.queue import Job, JobQueue
from benchmarks.capacity.timing import Timing
from dynamo_lite.disagg.decision.rule import WANT_OF_ROOM, decide
from dynamo_lite.protocol.decisions import DecisionInputs
from dynamo_lite.protocol.kv import Load
from dynamo_lite.protocol.options import DisaggOptions
from dynamo_lite.request_plane.admission import Admission
from dynamo_lite.serve.services.config import VllmWorkerConfig


class Tally:
    """Counts over all workers."""

    def __init__(self) -> None:
        #: Requests that got KV memory.
        self.admitted = 0
        #: Times between tokens.
        self.gaps = Histogram()
        #: Tokens of remote prefills, and of prompts that were computed locally because the queue
        #: had no room.
        self.asked_tokens = self.refused_tokens = 0
        #: Tokens that prefill workers have written, and the time in which they had jobs.
        self.written_tokens, self.busy_s = 0, 0.0


class DecodeWorkerModel:
    """lease_id: its name. on_answered: called when a client has the first token. on_ended: the last
    one."""

    def __init__(
        self,
        lease_id: int,
        timing: Timing,
        thresholds: DisaggOptions,
        events: Events,
        queue: JobQueue,
        tally: Tally,
        on_answered: Callable[[Sequence], None],
        on_ended: Callable[["DecodeWorkerModel", Sequence], None],
    ):
        self.lease_id, self.leaving = lease_id, False
        self._timing, self._thresholds, self._events = timing, thresholds, events
        self._queue, self._tally = queue, tally
        self._on_answered, self._on_ended = on_answered, on_ended
        self._admission = Admission(VllmWorkerConfig())
        self.network_free_at = 0.0
        self.report = Load()
        self.engine = EngineModel(
            timing,
            events,
            admit=self._admit,
            on_computed=self._answered,
            on_end=self._ended,
            gaps=tally.gaps,
        )

    @property
    def busy(self) -> int:
        """Requests in flight."""
        return self._admission.in_flight

    @property
    def idle(self) -> bool:
        return not self.busy

    @property
    def running(self) -> int:
        return len(self.engine.running)

    @property
    def waiting(self) -> int:
        """Requests, also those that wait for a remote prefill."""
        return self.busy - self.running

    @property
    def kv_usage(self) -> float:
        return self.engine.usage

    @property
    def max_running(self) -> int:
        return self._timing.max_num_seqs

    def make_report(self) -> None:
        self.report = Load(self.busy, 0, self.kv_usage, self._admission.waiting_tokens)

    def submit(self, number: int, request: Request) -> bool:
        """Returns whether the worker took the request."""
        if self._admission.enter(str(number), request.prompt_tokens) is not None:
            return False
        self.engine.add(
            Sequence(request, request.prompt_tokens, request.output_tokens, note=number)
        )
        return True

    def first_token(self, job: Job) -> None:
        """The prefill worker has sent the first token."""
        job.sequence.first_at = self._events.now
        self._answered(job.sequence)

    def received(self, job: Job) -> None:
        """The KV of a remote prefill is here."""
        self.engine.arrived(job.sequence)

    def _admit(self, sequence: Sequence) -> bool:
        if sequence.first_at is not None or sequence.left < sequence.request.output_tokens:
            return True  # preempted: computed again here
        self._tally.admitted += 1
        inputs = DecisionInputs(
            prompt_tokens=sequence.context,
            cached_tokens=0,
            queue=self._queue.seen(),
            leaving=self.leaving,
        )
        reason = decide(inputs, self._thresholds)
        if reason in WANT_OF_ROOM:
            self._tally.refused_tokens += sequence.context
        if reason.verdict == "local":
            return True
        job = Job(sequence, self, sequence.context)
        self._tally.asked_tokens += job.tokens
        self._queue.add(job)
        now = self._events.now
        self._events.at(now + self._timing.handover_s, self._queue.push, job)
        self._events.at(now + self._thresholds.remote_prefill_timeout_s, self._too_late, job)
        return False

    def _too_late(self, job: Job) -> None:
        if not job.ended:
            self._queue.end(job)
            self.engine.compute(job.sequence)

    def _answered(self, sequence: Sequence) -> None:
        self._admission.answered(str(sequence.note))
        self._on_answered(sequence)

    def _ended(self, sequence: Sequence) -> None:
        self._admission.leave(str(sequence.note))
        self._on_ended(self, sequence)
