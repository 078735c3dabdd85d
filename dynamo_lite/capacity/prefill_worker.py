"""A prefill worker: slots, an engine, and a network interface."""

from collections.abc import Callable

from dynamo_lite.capacity.engine import EngineModel
from dynamo_lite.capacity.events import Events
from dynamo_lite.capacity.histogram import Histogram
from dynamo_lite.capacity.jobs import JobModel, JobQueue
from dynamo_lite.capacity.kv_pool import KvPool
from dynamo_lite.capacity.options import GraphModelOptions
from dynamo_lite.capacity.sequence import Sequence
from dynamo_lite.capacity.timing import Timing, TransferTiming
from dynamo_lite.policy.decision.lanes import BEFORE_LONG, LaneTurns


class Nic:
    """A worker's network interface: one transfer after the other, at full speed."""

    def __init__(self) -> None:
        self.free_at = 0.0


def arrives_at(
    timing: TransferTiming,
    *,
    tokens: int,
    last_tokens: int,
    first_at: float,
    now: float,
    sender: Nic,
    receiver: Nic,
) -> float:
    """When the KV of `tokens` tokens is there, and takes both interfaces until then.

    Finished chunks are sent while the next one is computed: after the last one (now) only its
    `last_tokens` are left, if the network has kept pace since the first one (first_at).
    """
    per_token = timing.bytes_per_token / timing.bytes_per_s
    start = max(first_at, sender.free_at, receiver.free_at)
    end = max(now + last_tokens * per_token, start + tokens * per_token)
    sender.free_at = receiver.free_at = end
    return end + timing.commit_s


class PrefillWorkerModel:
    """on_first: called with a job whose first token is computed. on_delivered: called with a job
    whose KV is in the decode engine, or came too late."""

    def __init__(
        self,
        timing: Timing,
        options: GraphModelOptions,
        events: Events,
        queue: JobQueue,
        *,
        on_first: Callable[[JobModel], None],
        on_idle: Callable[["PrefillWorkerModel"], None],
    ):
        self._timing, self._options, self._events, self._queue = timing, options, events, queue
        self._on_first, self._on_idle = on_first, on_idle
        self.turns = LaneTurns()
        self.leaving = False
        self.jobs = self.claimed_tokens = 0
        self._nic = Nic()
        self.engine = EngineModel(
            timing.step,
            timing.engine,
            KvPool(timing.engine.kv_tokens, options.block_tokens),
            options.block_tokens,
            events,
            admit=self._admit,
            on_computed=self._computed,
            on_end=_never,
            gaps=Histogram(),
        )

    def start(self) -> None:
        """All slots are free."""
        for _ in range(self._options.concurrency):
            self._queue.pull(self, only_short=False)
        if self._options.order == "short-first":
            for _ in range(self._options.short_slots):
                self._queue.pull(self, only_short=True)

    def take(self, job: JobModel, only_short: bool) -> None:
        self._queue.claimed(job, self._events.now)
        self.jobs += 1
        self.claimed_tokens += job.tokens
        sequence = Sequence(
            job.sequence.request,
            job.sequence.context,
            0,
            short=job.lane in BEFORE_LONG,
            note=(job, only_short),
        )
        self.engine.add(sequence)

    def _admit(self, sequence: Sequence, cached: int) -> bool:
        """The prefix that the decode engine has is read from there."""
        job, _ = self._note(sequence)
        sequence.computed = max(cached, job.cached_tokens)
        return True

    def _computed(self, sequence: Sequence) -> None:
        job, _ = self._note(sequence)
        now, limits = self._events.now, self._timing.engine
        assert job.claimed_at is not None
        if not job.ended and self._options.first_token_from_prefill:
            self._on_first(job)
        at = arrives_at(
            self._timing.transfer,
            tokens=job.tokens,
            last_tokens=min(job.tokens, limits.max_num_batched_tokens),
            first_at=job.claimed_at,
            now=now,
            sender=self._nic,
            receiver=job.decode.nic,
        )
        self._events.at(at, self._delivered, sequence)

    def _delivered(self, sequence: Sequence) -> None:
        job, only_short = self._note(sequence)
        self.jobs -= 1
        self.claimed_tokens -= job.tokens
        self.engine.release(sequence)
        self.engine.wake()
        if not job.ended:
            self._queue.delivered(job)
            job.decode.received(job)
        self._queue.pull(self, only_short=only_short)
        if self.leaving and not self.jobs:
            self._on_idle(self)

    @staticmethod
    def _note(sequence: Sequence) -> tuple[JobModel, bool]:
        note = sequence.note
        assert isinstance(note, tuple)
        return note


def _never(_: Sequence) -> None:
    raise AssertionError("a prefill engine gives no tokens")
