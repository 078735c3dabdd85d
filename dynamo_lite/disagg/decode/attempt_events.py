"""Tells a decode engine's ledger what happens to its attempts, and carries out what follows.

Runs on the bridge's event loop, and is the only one that has the ledger. The engine's events come
with its steps, those of writers as messages, those of members from etcd and heartbeats; times that
pass are a timer. What follows for the engine goes into its inbox.
"""

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
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
from dynamo_lite.disagg.decode.prefill_workers import PrefillWorkers
from dynamo_lite.disagg.queue.base import PrefillQueue
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import DynamoLiteError, ProtocolError
from dynamo_lite.protocol.prefill import ClaimRefused, Held, decode_claim, decode_done
from dynamo_lite.runtime.drops import OnDrop
from dynamo_lite.runtime.tasks import OnFailure, OwnedTasks, log_failure

logger = logging.getLogger(__name__)

#: How many characters of a writer's failure message are kept for `explain`.
_MAX_DETAIL = 500


@dataclass(frozen=True)
class Claimed:
    """A writer holds the attempt since `at`, in monotonic seconds. claim: its id."""

    attempt: str
    claim: int
    writer: int
    at: float


Event = Claimed | Release | Ended
#: What the bridge tells the engine's thread, which takes it in each step.
Inbox = deque[Event]

LedgerEvent = Callable[[Ledger], list[Instruction]]


class AttemptEvents:
    """Use `running()` as a context. now: monotonic.

    When the ledger itself fails at an event, its state is unknown, and instructions may be lost
    for which a request waits. So that ends the session, see `running`.
    """

    def __init__(
        self,
        ledger: Ledger,
        inbox: Inbox,
        queue: PrefillQueue,
        workers: PrefillWorkers,
        now: Callable[[], float],
        on_drop: OnDrop,
    ):
        self.ledger, self._inbox = ledger, inbox
        self._queue, self._workers, self._now, self._on_drop = queue, workers, now, on_drop
        self._tasks: OwnedTasks | None = None
        self._on_failure: OnFailure = log_failure
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def running(self, on_failure: OnFailure = log_failure) -> AsyncIterator[None]:
        """Owns what `start` starts, and waits for its end. on_failure: of an event."""
        async with OwnedTasks(on_failure) as tasks:
            self._tasks = tasks
            try:
                yield
            finally:  # the roster and the links end later, and may still report changes
                self._tasks = None
                if self._timer is not None:
                    self._timer.cancel()
            await tasks.join()

    def apply(self, event: LedgerEvent) -> None:
        try:
            instructions = event(self.ledger)
        except Exception as exc:
            logger.exception("the ledger failed at an event")
            self.start(_raised(exc), "ledger event")
            return
        for instruction in instructions:
            if isinstance(instruction, DeleteJob):
                self.start(self._delete(instruction.sequence), f"delete job {instruction.sequence}")
            else:
                self._inbox.append(instruction)
        self._set_timer()

    def start(self, coro: Coroutine[Any, Any, None], about: str) -> None:
        """Runs it as a task, whose failure ends the session; drops it outside of `running`."""
        if self._tasks is not None:
            self._tasks.start(coro, name=about)
        else:
            coro.close()

    def on_left(self, left: frozenset[int]) -> None:
        """These workers' keys are gone."""
        now = self._now()
        for lease_id in left:
            self.apply(lambda ledger, writer=lease_id: ledger.writer_left(writer, now))

    def on_silent(self, lost: frozenset[int]) -> None:
        """These workers do not respond any more, or are unhealthy."""
        for lease_id in lost:
            self.apply(lambda ledger, writer=lease_id: ledger.writer_silent(writer))

    async def on_claim(self, payload: bytes) -> bytes:
        """A writer claims an attempt, or renews its claim. Returns the encoded answer."""
        claim = decode_claim(payload)
        attempt, writer, now = claim.attempt, claim.writer_lease_id, self._now()
        self._workers.show_life(writer)
        is_first = self.ledger.state(attempt) is AttemptState.QUEUED
        refusal = self._trouble(writer) if is_first else ""
        refusal = refusal or self.ledger.claim(attempt, claim.claim, writer, now)
        if refusal:
            self._on_drop("claim")
            return encode(ClaimRefused(reason=refusal))
        if is_first:
            # Before the writer gets its answer, so that the ranks know the claim before the first
            # commit, or in the step after it.
            self._inbox.append(Claimed(attempt, claim.claim, writer, now))
        self._set_timer()
        return encode(Held(for_s=self.ledger.claim_s))

    async def on_done(self, payload: bytes) -> None:
        """A writer reports that it is done. Raises ProtocolError if another holds the attempt."""
        done = decode_done(payload)
        attempt, claim, detail = done.attempt, done.claim, done.detail[:_MAX_DETAIL]
        if self.ledger.claim_of(attempt) not in (0, claim):
            raise ProtocolError(f"attempt {attempt} is held under another claim")
        if done.outcome != "written":
            what = self.ledger.request(attempt), attempt, done.outcome, detail
            logger.info("request %s: attempt %s: its writer reports %s: %s", *what)
        outcome = _OUTCOMES[done.outcome]
        self.apply(lambda ledger: ledger.writer_done(attempt, claim, outcome, detail))

    def _trouble(self, writer: int) -> str:
        """Why this worker must not get a claim; empty if it may."""
        if not self._workers.is_registered(writer):
            return "no such prefill worker"  # nothing would report when it is gone
        if trouble := self._workers.trouble(writer):
            return f"not able to work: {trouble}"
        return ""

    async def _delete(self, sequence: int) -> None:
        """A job that stays is safe, because no writer gets a claim for an attempt that has ended;
        the broker drops it at its deadline."""
        try:
            await self._queue.delete(sequence)
        except DynamoLiteError as exc:
            logger.warning("job %d was not deleted: %s", sequence, exc)

    def _set_timer(self) -> None:
        """For the next time that passes in the ledger."""
        due = self.ledger.next_due
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._tasks is not None and due < math.inf:
            delay_s = max(0.0, due - self._now())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self._now()
        self.apply(lambda ledger: ledger.tick(now))


_OUTCOMES = {
    "written": None,
    "failed": Outcome.WRITER_FAILED,
    "abandoned": Outcome.WRITER_ABANDONED,
}


async def _raised(exc: Exception) -> None:
    raise exc
