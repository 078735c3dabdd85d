"""Remote prefills: their jobs, the queue with its lanes, and what engines know of the backlog."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dynamo_lite.capacity.options import GraphModelOptions
from dynamo_lite.capacity.sequence import Sequence
from dynamo_lite.policy.decision.backlog import BacklogTotals, DrainRate, wait_s
from dynamo_lite.policy.decision.lanes import BEFORE_LONG, LaneTurns, lane_of
from dynamo_lite.protocol.backlog import Lane
from dynamo_lite.protocol.decisions import QueueSeen

if TYPE_CHECKING:
    from dynamo_lite.capacity.decode_worker import DecodeWorkerModel


@dataclass(eq=False, slots=True)
class JobModel:
    """One remote prefill."""

    sequence: Sequence
    decode: "DecodeWorkerModel"
    lane: Lane
    cached_tokens: int
    #: Tokens to be computed, and tokens to be written.
    tokens: int
    claimed_at: float | None = None
    #: Delivered, withdrawn or refused.
    ended: bool = False


class PullingWorker(Protocol):
    """A prefill worker as the queue sees it."""

    turns: LaneTurns
    leaving: bool

    def take(self, job: JobModel, only_short: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class _Slot:
    """A place for a job that waits for one."""

    number: int
    worker: PullingWorker
    only_short: bool


class JobQueue:
    """The prefill queue. Jobs of a lane go in order of arrival; the slot that has waited longest
    gets the next one."""

    def __init__(self, options: GraphModelOptions, on_change: Callable[[], None]):
        self._options, self._on_change = options, on_change
        self._lanes: dict[Lane, deque[JobModel]] = {
            lane: deque() for lane in (Lane if options.order == "short-first" else (Lane.LONG,))
        }
        self._full: deque[_Slot] = deque()
        self._short: deque[_Slot] = deque()
        self._number = 0
        #: Waiting and claimed, and the tokens of both.
        self.queued_jobs = self.claimed_jobs = self.claimed_tokens = 0
        self.queued_tokens = dict.fromkeys(Lane, 0)
        self.asked_tokens = self.done_tokens = 0

    @property
    def jobs(self) -> int:
        return self.queued_jobs + self.claimed_jobs

    @property
    def tokens(self) -> int:
        return sum(self.queued_tokens.values()) + self.claimed_tokens

    def lane_of(self, tokens: int) -> Lane:
        if self._options.order == "fifo":
            return Lane.LONG
        return lane_of(tokens, 0, self._options.short_length)

    def push(self, job: JobModel) -> bool:
        """Returns False if the queue is full."""
        if self.jobs >= self._options.max_jobs:
            return False
        self.queued_jobs += 1
        self.queued_tokens[job.lane] += job.tokens
        self.asked_tokens += job.tokens
        self._lanes[job.lane].append(job)
        if (slot := self._slot_for(job.lane)) is not None:
            self._serve(slot)
        self._on_change()
        return True

    def pull(self, worker: PullingWorker, *, only_short: bool) -> None:
        """A slot of the worker is free."""
        self._number += 1
        self._serve(_Slot(self._number, worker, only_short))

    def withdraw(self, job: JobModel) -> None:
        """The job has not been delivered in time, or its decode engine has withdrawn it."""
        job.ended = True
        if job.claimed_at is None:
            self._unqueue(job)
        else:
            self._unclaim(job)
        self._on_change()

    def delivered(self, job: JobModel) -> None:
        job.ended = True
        self._unclaim(job)
        self.done_tokens += job.tokens
        self._on_change()

    def claimed(self, job: JobModel, now: float) -> None:
        """Called by the worker that takes it."""
        self._unqueue(job)
        job.claimed_at = now
        self.claimed_jobs += 1
        self.claimed_tokens += job.tokens
        self._on_change()

    def totals(self) -> BacklogTotals:
        return BacklogTotals(
            self.queued_jobs,
            dict(self.queued_tokens),
            self.claimed_jobs,
            self.claimed_tokens,
            self.asked_tokens,
        )

    def _unqueue(self, job: JobModel) -> None:
        self.queued_jobs -= 1
        self.queued_tokens[job.lane] -= job.tokens

    def _unclaim(self, job: JobModel) -> None:
        self.claimed_jobs -= 1
        self.claimed_tokens -= job.tokens

    def _serve(self, slot: _Slot) -> None:
        """Gives the slot a job, or lets it wait for one."""
        if slot.worker.leaving:
            return
        lanes = [one for one in self._lanes if one in BEFORE_LONG or not slot.only_short]
        order = slot.worker.turns.order(lanes)
        for lane in order:
            waiting = self._lanes[lane]
            while waiting and waiting[0].ended:
                waiting.popleft()
            if waiting:
                job = waiting.popleft()
                slot.worker.turns.took(lane, order)
                slot.worker.take(job, slot.only_short)
                return
        (self._short if slot.only_short else self._full).append(slot)

    def _slot_for(self, lane: Lane) -> _Slot | None:
        """Removes the slot that waits longest for a job of this lane."""
        for slots in (self._full, self._short):
            while slots and slots[0].worker.leaving:
                slots.popleft()
        if lane in BEFORE_LONG and self._short:
            if not self._full or self._short[0].number < self._full[0].number:
                return self._short.popleft()
        return self._full.popleft() if self._full else None


class BacklogView:
    """What every decode engine knows of the backlog of the others, with a delay.

    workers: prefill workers that take jobs.
    """

    def __init__(self, options: GraphModelOptions, now: Callable[[], float]):
        self._age_s, self._now = options.backlog_age_s, now
        self.queue = JobQueue(options, self._changed)
        self.drain = DrainRate()
        self.workers = 0
        self._past: deque[tuple[float, BacklogTotals]] = deque([(0.0, BacklogTotals())])
        self._done_tokens = 0

    def view(self, lane: Lane, own: deque[tuple[float, Lane, int]]) -> QueueSeen:
        """For a prompt in this lane. own: jobs that the asking engine has added lately:
        time, lane, tokens; those that the others' messages contain are removed."""
        now = self._now()
        past = self._past
        while len(past) > 1 and past[1][0] <= now - self._age_s:
            past.popleft()
        while own and own[0][0] <= now - self._age_s:
            own.popleft()
        totals = past[0][1]
        if own:
            added = dict.fromkeys(Lane, 0)
            for _, its_lane, its_tokens in own:
                added[its_lane] += its_tokens
            totals = totals + BacklogTotals(len(own), added)
        rate = self.drain.tokens_per_s(now)
        return QueueSeen(
            jobs=totals.jobs,
            prefill_workers=self.workers,
            age_s=0.0,
            tokens=totals.tokens,
            wait_s=wait_s(totals, lane, rate=rate, workers=self.workers),
        )

    def _changed(self) -> None:
        now, queue = self._now(), self.queue
        self.drain.moved(
            now,
            done_tokens=queue.done_tokens - self._done_tokens,
            claimed_jobs=queue.claimed_jobs,
            workers=self.workers,
        )
        self._done_tokens = queue.done_tokens
        past = self._past
        while len(past) > 1 and past[1][0] <= now - self._age_s:
            past.popleft()
        past.append((now, queue.totals()))
