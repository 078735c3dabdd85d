"""The decode engine's network side: opens its connections, pushes jobs, answers writers and its
component, and tells the ledger what happens to attempts.

Runs on the bridge's event loop, and is the only one that has the ledger. The engine's events come
with its steps, those of writers as messages, those of members from etcd and heartbeats; times that
pass are a timer. What follows for the engine goes into its inbox.
"""

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
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
from dynamo_lite.disagg.bridge import ServerClients
from dynamo_lite.disagg.decision.lanes import lane_of
from dynamo_lite.disagg.decode.prefill_workers import PrefillWorkers
from dynamo_lite.disagg.decode.queue_watch import QueueWatch
from dynamo_lite.disagg.engine_config import DecodeEngineConfig, EngineConfig
from dynamo_lite.disagg.queue.base import PrefillQueue
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import (
    BrokerUnavailable,
    DynamoLiteError,
    ProtocolError,
    QueueFull,
)
from dynamo_lite.protocol.health import EngineStatus, decode_leave
from dynamo_lite.protocol.live_options import Values, applied
from dynamo_lite.protocol.prefill import (
    ClaimRefused,
    Held,
    RemotePrefillRequest,
    decode_claim,
    decode_done,
)
from dynamo_lite.runtime.clock import Clock
from dynamo_lite.runtime.drops import OnDrop, counted, uncounted
from dynamo_lite.runtime.members.live_options import LiveOptions
from dynamo_lite.runtime.tasks import OwnedTasks, needed, running

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


class ControlSession:
    """Use `session()` as the bridge's context.

    status: returns the reply to `describe`. explain: answers an `Explain`.
    When the ledger itself fails at an event, its state is unknown, and instructions may be lost
    for which a request waits. So that ends the session.
    """

    def __init__(
        self,
        config: EngineConfig,
        ledger: Ledger,
        *,
        status: Callable[[], EngineStatus | None],
        explain: Callable[[bytes], bytes],
        clients: ServerClients,
        clock: Clock,
        on_drop: OnDrop = uncounted,
    ):
        assert isinstance(config.role, DecodeEngineConfig)
        self._config, self._role, self.ledger = config, config.role, ledger
        self._status, self._explain = status, explain
        #: The config file's, overridden by live options. The bridge's thread replaces it as a
        #: whole; a decision reads it once.
        self.options = config.role.options
        self._clients, self._on_drop = clients, on_drop
        self._now, self._wall = clock.monotonic, clock.wall
        self.workers = PrefillWorkers(config, on_drop)
        self.queue_watch = QueueWatch(clock.monotonic)
        #: What the bridge tells the engine's thread, which takes it in each step.
        self.inbox: deque[Claimed | Release | Ended] = deque()
        #: None until the session is open: before that nothing is submitted to the bridge.
        self._queue: PrefillQueue | None = None
        #: Pushes and deletes of jobs. None outside of the session: members and writers may report
        #: changes before and after it.
        self._tasks: OwnedTasks | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: Whether the component has announced that it shuts down.
        self.leaving = False

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        """Raises the failure of a task without which the engine would work with what it knew."""
        config = self._config
        subject = config.namespace, config.engine_id
        async with contextlib.AsyncExitStack() as stack:
            enter = stack.enter_async_context
            on_failure = await enter(needed())
            messaging = await enter(self._clients.messaging())
            self._queue = queue = await enter(self._clients.queue(self._role.queue))
            store = await enter(self._clients.store())
            options = LiveOptions(
                store,
                config.namespace,
                self._role.component,
                on_change=self._on_options,
                on_drop=self._on_drop,
            )
            await enter(options.following(on_failure))
            changes = self._on_members, self._on_health, self._on_usable_change
            await enter(self.workers.follow(store, messaging, *changes, on_failure))
            for name, where, handler in (
                (names.claim_subject, "claim", self._on_claim),
                (names.done_subject, "done", self._on_done),
                (names.leave_subject, "leave", self._on_leave),
                (names.describe_subject, "describe", self._on_describe),
                (names.explain_subject, "explain", self._on_explain),
            ):
                handler = counted(handler, where, self._on_drop)
                await enter(messaging.serve(name(*subject), handler))
            watch = self.queue_watch.watch(queue)
            await enter(running(watch, name="queue-view", on_failure=on_failure))
            self._tasks = tasks = await enter(OwnedTasks(on_failure))
            try:
                yield
            finally:
                self._tasks = None
                if self._timer is not None:
                    self._timer.cancel()
            await tasks.join()

    # Events of attempts

    async def stepped(
        self, events: Sequence[LedgerEvent], jobs: Sequence[RemotePrefillRequest]
    ) -> None:
        """The engine has made a step. events: of attempts, in order. jobs: to be queued."""
        for event in events:
            self._apply(event)
        for job in jobs:
            self._start(self._push(job), f"push {job.attempt}")

    async def _on_claim(self, payload: bytes) -> bytes:
        """A writer claims an attempt, or renews its claim. Returns the encoded answer."""
        claim = decode_claim(payload)
        attempt, writer, now = claim.attempt, claim.writer_lease_id, self._now()
        self.workers.show_life(writer)
        entry = self.ledger.get(attempt)
        is_first = entry is not None and entry.state is AttemptState.QUEUED
        refusal = self.workers.trouble(writer) if is_first else ""
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

    async def _on_done(self, payload: bytes) -> None:
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
        self._apply(lambda ledger: ledger.writer_done(attempt, claim, outcome, detail))

    def _on_members(self, _joined: frozenset[int], left: frozenset[int]) -> None:
        """The keys of these workers are gone."""
        now = self._now()
        for lease_id in left:
            self._apply(lambda ledger, writer=lease_id: ledger.writer_left(writer, now))
        self._on_usable_change()

    def _on_health(self, _back: frozenset[int], lost: frozenset[int]) -> None:
        """These workers do not respond any more, or are unhealthy."""
        for lease_id in lost:
            self._apply(lambda ledger, writer=lease_id: ledger.writer_silent(writer))
        self._on_usable_change()

    def _on_usable_change(self) -> None:
        if not self.workers.usable:
            self._apply(lambda ledger: ledger.withdraw_queued(Outcome.NO_WRITER))

    def _on_time(self) -> None:
        self._timer = None
        now = self._now()
        self._apply(lambda ledger: ledger.tick(now))

    def _apply(self, event: LedgerEvent) -> None:
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

    # The queue

    async def _push(self, job: RemotePrefillRequest) -> None:
        """Queues the job. If the broker does not confirm it, the prompt is computed locally."""
        assert self._queue is not None
        attempt = job.attempt
        if not self.workers.usable:
            self._apply(lambda ledger: ledger.not_published(attempt))
            return
        try:
            tokens = len(job.prompt_token_ids) - job.num_computed_tokens
            lane = lane_of(tokens, job.priority, self._role.queue.short_length)
            payload = encode(job)
            sequence = await self._queue.push(
                payload, message_id=attempt, lane=lane, life_s=job.deadline - self._wall()
            )
        except Exception as exc:
            if not isinstance(exc, QueueFull | BrokerUnavailable):
                logger.exception("request %s: queueing the job failed", job.request_id)
            why = "request %s: computed locally, the job was not queued: %s"
            logger.info(why, job.request_id, exc)
            self._apply(lambda ledger: ledger.not_published(attempt))
        else:
            self.queue_watch.pushed.append((tokens, len(payload)))
            self._apply(lambda ledger: ledger.published(attempt, sequence, lane))

    async def _delete(self, sequence: int) -> None:
        """A job that stays is safe, because no writer gets a claim for an attempt that has ended;
        the broker drops it at its deadline."""
        assert self._queue is not None
        try:
            await self._queue.delete(sequence)
        except DynamoLiteError as exc:
            logger.warning("job %d was not deleted: %s", sequence, exc)

    # Messages of the component, and questions

    async def _on_leave(self, payload: bytes) -> bytes:
        """The component announces its shutdown: its keys may vanish for other reasons."""
        if decode_leave(payload).lease_id != self._config.lease_id:
            raise ProtocolError("leave message with the lease id of another worker")
        self.leaving = True
        self._apply(lambda ledger: ledger.withdraw_queued(Outcome.LEAVING))
        return b""

    async def _on_describe(self, _payload: bytes) -> bytes | None:
        status = self._status()
        return None if status is None else encode(status)

    async def _on_explain(self, payload: bytes) -> bytes:
        return self._explain(payload)

    def _on_options(self, values: Values) -> None:
        self.options = applied(values, self._role.options)


_OUTCOMES = {
    "written": None,
    "failed": Outcome.WRITER_FAILED,
    "abandoned": Outcome.WRITER_ABANDONED,
}


async def _raised(exc: Exception) -> None:
    raise exc
