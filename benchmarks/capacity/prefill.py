"""A prefill worker: slots, an engine, and a network interface."""

from collections.abc import Callable

from benchmarks.capacity.decode import Tally
from benchmarks.capacity.engine import EngineModel
from benchmarks.capacity.events import Events
from benchmarks.capacity.histogram import Histogram
from benchmarks.capacity.phase import Sequence
from benchmarks.capacity.queue import Job, JobQueue
from benchmarks.capacity.timing import Timing
from dynamo_lite.serve.services.config import PrefillWorkerConfig


class PrefillWorkerModel:
    """All its slots are free. on_delivered: called after each job."""

    def __init__(
        self,
        timing: Timing,
        events: Events,
        queue: JobQueue,
        tally: Tally,
        on_delivered: Callable[["PrefillWorkerModel"], None],
    ):
        self._timing, self._events, self._queue = timing, events, queue
        self._tally, self._on_delivered = tally, on_delivered
        self.leaving = False
        self._jobs = 0
        #: Until when its time with jobs is counted.
        self._busy_until = 0.0
        #: Tokens of its jobs.
        self.busy = 0
        self._network_free_at = 0.0
        self._engine = EngineModel(
            timing,
            events,
            admit=lambda _: True,
            on_computed=self._computed,
            on_end=_never,
            gaps=Histogram(),
        )
        for _ in range(PrefillWorkerConfig.concurrency):
            queue.pull(self)

    @property
    def idle(self) -> bool:
        return not self._jobs

    def take(self, job: Job) -> None:
        job.claimed_at = self._events.now
        if not self._jobs:
            self._busy_until = self._events.now
        self._jobs += 1
        self.busy += job.tokens
        self._engine.add(Sequence(job.sequence.request, job.tokens, 0, note=job))

    def _computed(self, sequence: Sequence) -> None:
        job = _job(sequence)
        if not job.ended:
            job.decode.first_token(job)
        self._events.at(self._arrival(job), self._delivered, sequence)

    def _arrival(self, job: Job) -> float:
        """When all its KV is there. Both network interfaces are taken until then.

        Finished chunks are sent while the next one is computed: after the last one (now) only its
        tokens are left, if the network has kept pace since the claim.
        """
        timing, decode = self._timing, job.decode
        assert job.claimed_at is not None
        per_token = timing.bytes_per_token / timing.bytes_per_s
        start = max(job.claimed_at, self._network_free_at, decode.network_free_at)
        last = min(job.tokens, timing.max_num_batched_tokens)
        end = max(self._events.now + last * per_token, start + job.tokens * per_token)
        self._network_free_at = decode.network_free_at = end
        return end + timing.commit_s

    def _delivered(self, sequence: Sequence) -> None:
        job = _job(sequence)
        self._tally.busy_s += self._events.now - self._busy_until
        self._busy_until = self._events.now
        self._jobs -= 1
        self.busy -= sequence.context
        self._engine.release(sequence)
        if not job.ended:
            self._tally.written_tokens += job.tokens
            self._queue.end(job)
            job.decode.received(job)
        self._queue.pull(self)
        self._on_delivered(self)


def _job(sequence: Sequence) -> Job:
    assert isinstance(sequence.note, Job)
    return sequence.note


def _never(_: Sequence) -> None:
    raise AssertionError("a prefill engine gives no tokens")
