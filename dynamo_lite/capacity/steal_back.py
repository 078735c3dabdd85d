"""Steal back in a simulated decode worker: looks at its queued jobs as the real one does."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from dynamo_lite.capacity.engine import EngineModel
from dynamo_lite.capacity.events import Events
from dynamo_lite.capacity.jobs import BacklogView, JobModel
from dynamo_lite.capacity.timing import Timing
from dynamo_lite.policy.decision.steal_back import QueuedPrefill, TakeBack, look
from dynamo_lite.protocol.backlog import Lane
from dynamo_lite.protocol.decisions import QueueSeen

#: A simulated graph always has changes, so each look comes as early as allowed.
_PERIOD_S = 0.1


@dataclass(frozen=True, slots=True)
class _Asked:
    """When a job was requested, and its place at that time."""

    name: str
    at: float
    expected_s: float | None
    ahead_tokens: float
    done_tokens: int


class StealBackModel:
    """view: called with a lane; the queue as such a job sees it. on_taken: called with a job that
    was withdrawn and is computed here. The costs of a local prefill are known exactly."""

    def __init__(
        self,
        name: str,
        timing: Timing,
        events: Events,
        engine: EngineModel,
        backlog: BacklogView,
        view: Callable[[Lane], QueueSeen],
        on_taken: Callable[[JobModel], None],
    ):
        self._name, self._timing, self._events, self._engine = name, timing, events, engine
        self._backlog, self._view, self._on_taken = backlog, view, on_taken
        self._asked: dict[JobModel, _Asked] = {}
        self._number = self._looks = 0

    def asks(self, job: JobModel) -> None:
        """To be called before the job counts in the view."""
        if not self._asked:
            self._events.at(self._events.now + _PERIOD_S, self._look)
        wait_s = self._view(job.lane).wait_s
        ahead = math.inf if wait_s is None else wait_s * self._tokens_per_s()
        self._number += 1
        self._asked[job] = _Asked(
            f"{self._name}/{self._number}",
            self._events.now,
            wait_s,
            ahead,
            self._backlog.queue.done_tokens,
        )

    def _tokens_per_s(self) -> float:
        return (self._backlog.drain.tokens_per_s(self._events.now) or 0.0) * self._backlog.workers

    def _look(self, _: None) -> None:
        for job in [job for job in self._asked if job.ended or job.claimed_at is not None]:
            del self._asked[job]
        if not self._asked:
            return
        self._looks += 1
        jobs = {asked.name: job for job, asked in self._asked.items()}
        verdict = look(
            [self._costs(job, asked) for job, asked in self._asked.items()],
            streams=self._engine.streams,
            prefill_here=self._engine.prefills_here,
            number=self._looks,
        )
        if isinstance(verdict, TakeBack):
            job = jobs[verdict.attempt]
            self._backlog.queue.withdraw(job)
            self._on_taken(job)
        self._events.at(self._events.now + _PERIOD_S, self._look)

    def _costs(self, job: JobModel, asked: _Asked) -> QueuedPrefill:
        limits, step, rate = self._timing.engine, self._timing.step, self._tokens_per_s()
        steps = math.ceil(job.tokens / limits.max_num_batched_tokens)
        work = job.tokens * (job.cached_tokens + job.tokens / 2)
        ahead_s = None
        if rate:
            before = asked.ahead_tokens - (self._backlog.queue.done_tokens - asked.done_tokens)
            others = (self._view(job.lane).wait_s or 0.0) * rate - job.tokens
            ahead_s = max(min(before, others), 0.0) / rate
        return QueuedPrefill(
            attempt=asked.name,
            local_s=step.one(tokens=job.tokens, attention=work) + (steps - 1) * step.step_s,
            waited_s=self._events.now - asked.at,
            expected_s=asked.expected_s,
            ahead_s=ahead_s,
        )
