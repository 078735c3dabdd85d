"""What happens to a decode engine's attempts: pushes their jobs, answers their writers, and tells
the ledger.

Runs on the bridge's event loop, and is the only one that has the ledger. The engine's events come
with its steps, those of writers as messages, those of prefill workers from etcd and heartbeats;
times that pass are a timer. What follows for the engine goes into its inbox.
"""

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_lite.disagg.attempts.ledger import (
    AttemptState,
    DeleteJob,
    Ended,
    Instruction,
    Ledger,
    Outcome,
    Release,
)
from dynamo_lite.disagg.decision.lanes import lane_of
from dynamo_lite.disagg.decode.prefill_workers import PrefillWorkers
from dynamo_lite.disagg.decode.queue_watch import QueueWatch
from dynamo_lite.disagg.queue.base import PrefillQueue
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import (
    BrokerUnavailable,
    DynamoLiteError,
    ProtocolError,
    QueueFull,
)
from dynamo_lite.protocol.prefill import (
    ClaimRefused,
    Held,
    RemotePrefillRequest,
    decode_claim,
    decode_done,
)
from dynamo_lite.runtime.clock import Clock
from dynamo_lite.runtime.drops import OnDrop
from dynamo_lite.runtime.tasks import OwnedTasks

logger = logging.getLogger(__name__)

#: How many characters of a writer's failure message are kept for `explain`.
_MAX_DETAIL = 500

LedgerEvent = Callable[[Ledger], list[Instruction]]


@dataclass(frozen=True)
class Claimed:
    """A writer holds the attempt since `at`, in monotonic seconds. claim: its id."""

    attempt: str
    claim: int
    writer: int
    at: float


class AttemptEvents:
    """short_length: see `lane_of`.

    When the ledger itself fails at an event, its state is unknown, and instructions may be lost
    for which a request waits. So that ends the session.
    """

    def __init__(
        self,
        ledger: Ledger,
        workers: PrefillWorkers,
        queue_watch: QueueWatch,
        short_length: int,
        clock: Clock,
        on_drop: OnDrop,
    ):
        self.ledger = ledger
        self._workers, self._queue_watch = workers, queue_watch
        self._short_length, self._on_drop = short_length, on_drop
        self._now, self._wall = clock.monotonic, clock.wall
        #: What the bridge tells the engine's thread, which takes it in each step.
        self.inbox: deque[Claimed | Release | Ended] = deque()
        #: None until the session is open: before that the engine makes no steps.
        self._queue: PrefillQueue | None = None
        #: Pushes and deletes of jobs. None outside of the session: prefill workers may report
        #: changes before and after it.
        self._tasks: OwnedTasks | None = None
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def session(self, queue: PrefillQueue, tasks: OwnedTasks) -> Iterator[None]:
        """The connection to the queue is open."""
        self._queue, self._tasks = queue, tasks
        try:
            yield
        finally:
            self._tasks = None
            if self._timer is not None:
                self._timer.cancel()

    def stepped(self, events: Sequence[LedgerEvent], jobs: Sequence[RemotePrefillRequest]) -> None:
        """The engine has made a step. events: of attempts, in order. jobs: to be queued."""
        for event in events:
            self.apply(event)
        for job in jobs:
            self._start(self._push(job), f"push {job.attempt}")

    async def on_claim(self, payload: bytes) -> bytes:
        """A writer claims an attempt, or renews its claim. Returns the encoded answer."""
        claim = decode_claim(payload)
        attempt, writer, now = claim.attempt, claim.writer_lease_id, self._now()
        self._workers.health.shows_life(writer)
        entry = self.ledger.get(attempt)
        is_first = entry is not None and entry.state is AttemptState.QUEUED
        refusal = self._trouble(writer) if is_first else ""
        refusal = refusal or self.ledger.claim(attempt, claim.claim, writer, now)
        if refusal:
            self._on_drop("claim")
            return encode(ClaimRefused(reason=refusal))
        if is_first:
            # Before the writer gets its answer, so that the ranks know the claim before the first
            # commit, or in the step after it.
            self.inbox.append(Claimed(attempt, claim.claim, writer, now))
        self._set_timer()
        return encode(Held(for_s=self.ledger.claim_s))

    def _trouble(self, writer: int) -> str:
        """Why the worker must not get a claim; empty if it may. One that is not registered
        must not get one: nothing would report its end."""
        why = self._workers.health.trouble(writer)
        return f"not able to work: {why}" if why else ""

    async def on_done(self, payload: bytes) -> None:
        """A writer reports that it is done. Raises ProtocolError if another holds the attempt."""
        done = decode_done(payload)
        attempt, claim, detail = done.attempt, done.claim, done.detail[:_MAX_DETAIL]
        entry = self.ledger.get(attempt)
        if entry is not None and entry.claim not in (0, claim):
            raise ProtocolError(f"attempt {attempt} is held under another claim")
        if entry is not None and done.outcome != "written":
            what = entry.request_id, attempt, done.outcome, detail
            logger.info("request %s: attempt %s: its writer reports %s: %s", *what)
        outcome = _OUTCOMES[done.outcome]
        self.apply(lambda ledger: ledger.writer_done(attempt, claim, outcome, detail))

    def workers_changed(self, left: frozenset[int], unwell: frozenset[int]) -> None:
        """left: the keys of these workers are gone. unwell: these do not respond any more, or are
        unhealthy."""
        now = self._now()
        for lease_id in left:
            self.apply(lambda ledger, writer=lease_id: ledger.writer_left(writer, now))
        for lease_id in unwell:
            self.apply(lambda ledger, writer=lease_id: ledger.writer_silent(writer))
        if not self._workers.usable:
            self.apply(lambda ledger: ledger.withdraw_queued(Outcome.NO_WRITER))

    def _on_time(self) -> None:
        self._timer = None
        now = self._now()
        self.apply(lambda ledger: ledger.tick(now))

    def apply(self, event: LedgerEvent) -> None:
        try:
            instructions = event(self.ledger)
        except Exception as exc:
            logger.exception("the ledger failed at an event")
            self._start(_raised(exc), "ledger event")
            return
        for instruction in instructions:
            if isinstance(instruction, DeleteJob):
                sequence = instruction.sequence
                self._start(self._delete(sequence), f"delete job {sequence}")
            else:
                self.inbox.append(instruction)
        self._set_timer()

    def _set_timer(self) -> None:
        """For the next time that passes in the ledger."""
        due = self.ledger.next_due
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._tasks is not None and due < math.inf:
            delay_s = max(0.0, due - self._now())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_time)

    def _start(self, coro: Coroutine[Any, Any, None], about: str) -> None:
        """Runs it as a task, whose failure ends the session."""
        if self._tasks is not None:
            self._tasks.start(coro, name=about)
        else:
            coro.close()

    async def _push(self, job: RemotePrefillRequest) -> None:
        """Queues the job. If the broker does not confirm it, the prompt is computed locally."""
        assert self._queue is not None
        attempt = job.attempt
        if not self._workers.usable:
            self.apply(lambda ledger: ledger.not_published(attempt))
            return
        try:
            tokens = len(job.prompt_token_ids) - job.num_computed_tokens
            lane = lane_of(tokens, job.priority, self._short_length)
            payload = encode(job)
            sequence = await self._queue.push(
                payload, message_id=attempt, lane=lane, life_s=job.deadline - self._wall()
            )
        except Exception as exc:
            if not isinstance(exc, QueueFull | BrokerUnavailable):
                logger.exception("request %s: queueing the job failed", job.request_id)
            why = "request %s: computed locally, the job was not queued: %s"
            logger.info(why, job.request_id, exc)
            self.apply(lambda ledger: ledger.not_published(attempt))
        else:
            self._queue_watch.pushed.append((tokens, len(payload)))
            self.apply(lambda ledger: ledger.published(attempt, sequence, lane))

    async def _delete(self, sequence: int) -> None:
        """A job that stays is safe, because no writer gets a claim for an attempt that has ended;
        the broker drops it at its deadline."""
        assert self._queue is not None
        try:
            await self._queue.delete(sequence)
        except DynamoLiteError as exc:
            logger.warning("job %d was not deleted: %s", sequence, exc)


_OUTCOMES = {
    "written": None,
    "failed": Outcome.WRITER_FAILED,
    "abandoned": Outcome.WRITER_ABANDONED,
}


async def _raised(exc: Exception) -> None:
    raise exc
