"""The decode engine's network side: pushes jobs, answers claims, watches writers.

It runs on the bridge's event loop and shares the ledger with the scheduler half under one
lock. The engine's next step carries out the instructions about its blocks; this session
carries out all others.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from dynamo_lite.disagg.decode.backlog import BacklogExchange, job_tokens
from dynamo_lite.disagg.decode.granting import Granting
from dynamo_lite.disagg.decode.live_thresholds import LiveThresholds
from dynamo_lite.disagg.decode.prefill_workers import PrefillWorkers
from dynamo_lite.disagg.decode.queue_watch import QueueWatch
from dynamo_lite.disagg.decode.remote_prefills import RemotePrefills
from dynamo_lite.disagg.decode.shared_state import LockedLedger, PollWindow
from dynamo_lite.disagg.engine_config import DecodeEngineConfig, EngineConfig
from dynamo_lite.disagg.grant_seals import GrantSeals
from dynamo_lite.disagg.server_clients import ServerClients
from dynamo_lite.policy.attempt import Refusal
from dynamo_lite.policy.disagg import fresh
from dynamo_lite.policy.instructions import CancelWriter, DeleteJob, Instruction, Outcome
from dynamo_lite.policy.ledger import Ledger
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode, encode_sealed
from dynamo_lite.protocol.errors import (
    BrokerUnavailable,
    DynamoLiteError,
    NoResponders,
    ProtocolError,
    PushAmbiguous,
    QueueFull,
)
from dynamo_lite.protocol.grant import blocks_digest
from dynamo_lite.protocol.prefill import (
    CancelAttempt,
    ClaimRefused,
    EngineStatus,
    Granted,
    RemotePrefillRequest,
    StayAccepted,
    StayRefused,
    WriterDone,
    decode_claim,
    decode_leave,
    decode_listen,
    decode_writer_done,
    decode_writer_stays,
)
from dynamo_lite.queue.base import PrefillQueue
from dynamo_lite.runtime.drops import OnDrop, counted, uncounted
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.sealed_records import RecordSeals

logger = logging.getLogger(__name__)

#: How long a writer whose keys are gone has to answer that its process still runs.
_ALIVE_TIMEOUT_S = 1.0
#: How many characters of a writer's failure message are kept for `explain`.
_MAX_DETAIL = 500


class ControlSession:
    """Use `session()` as the bridge's context.

    status: returns the reply to `describe`; called on the bridge's thread. tuning: follows the
    live options of the engine's component. new_grant: returns a new grant's id, above 0. now:
    monotonic. wall: seconds since the epoch. on_news: called when the queue, other engines'
    backlogs or the prefill workers have changed.
    """

    def __init__(
        self,
        config: EngineConfig,
        book: LockedLedger,
        prefills: RemotePrefills,
        status: Callable[[], EngineStatus | None],
        tuning: LiveThresholds,
        *,
        outside: ServerClients,
        new_grant: Callable[[], int],
        now: Callable[[], float],
        wall: Callable[[], float],
        on_drop: OnDrop = uncounted,
        on_news: Callable[[], None],
    ):
        assert isinstance(config.role, DecodeEngineConfig)
        self._config, self._role, self._book, self._status = config, config.role, book, status
        self._prefills, self._outside, self._tuning = prefills, outside, tuning
        self._now, self._wall = now, wall
        seals = GrantSeals.of_file(config.secret_file)
        self._granting = Granting(book, config.engine_id, seals, new_grant)
        self._on_drop = on_drop
        self._queue: PrefillQueue | None = None
        self._messaging: Messaging | None = None
        self.workers = PrefillWorkers(config, on_drop)
        self._tasks: asyncio.TaskGroup | None = None
        self.backlog = BacklogExchange(
            config, prefills, lambda: len(self.workers.usable), now, on_drop, on_news
        )
        self.queue_watch = QueueWatch(
            config, self.workers, tuning, lambda: self.backlog.rank, now, on_drop, on_news
        )
        #: Whether the component has announced that it shuts down.
        self.leaving = False
        self.listening = PollWindow(now)

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        config = self._config
        subject = config.namespace, config.engine_id
        async with contextlib.AsyncExitStack() as stack:
            enter = stack.enter_async_context
            self._messaging = messaging = await enter(self._outside.messaging())
            self._queue = await enter(self._outside.queue(self._role.queue))
            store = await enter(self._outside.store())
            seals = RecordSeals.of_file(config.secret_file)
            await enter(self._tuning.follow(store, config.namespace, self._on_drop, seals))
            await enter(self.workers.follow(store, messaging, self._on_usable_change))
            for name, where, handler in (
                (names.claim_subject, "claim", self._on_claim),
                (names.writer_done_subject, "writer_done", self._on_done),
                (names.writer_stays_subject, "writer_stays", self._on_stays),
                (names.leave_subject, "leave", self._on_leave),
                (names.poll_subject, "poll", self._on_poll),
                (names.describe_subject, "describe", self._on_describe),
                (names.explain_subject, "explain", self._on_explain),
            ):
                handler = counted(handler, where, self._on_drop)
                await enter(messaging.serve(name(*subject), handler))
            await enter(self.backlog.running(messaging))
            await enter(self.queue_watch.running(self._queue, messaging))
            async with asyncio.TaskGroup() as self._tasks:
                self.workers.listen(self._on_writers, self._on_health)
                try:
                    with self._queue.on_lost(self._on_queue_lost):
                        yield
                finally:  # the roster and the links end later, and may still report changes
                    self._tasks = None

    async def push(self, job: RemotePrefillRequest) -> None:
        """Queues the job. If the broker does not confirm it, the prompt is computed locally."""
        assert self._queue is not None
        self.backlog.changed()
        blocks = blocks_digest(job.block_ids, job.prefix_block_ids)
        with self._book.lock:
            self._book.ledger.offered(job.attempt, blocks)
        if not self.workers.usable:
            await self._apply_event(lambda ledger: ledger.not_published(job.attempt))
            return
        try:
            lane = self.backlog.lane_of(job_tokens(job), job.priority)
            sequence = await self._queue.push(encode_sealed(job), message_id=job.attempt, lane=lane)
        except (QueueFull, BrokerUnavailable, PushAmbiguous) as exc:
            logger.info(
                "request %s: computed locally, the job was not queued: %s", job.request_id, exc
            )
            if not isinstance(exc, QueueFull):
                self.queue_watch.doubt()
            await self._apply_event(lambda ledger: ledger.not_published(job.attempt))
        except Exception:
            await self._apply_event(lambda ledger: ledger.not_published(job.attempt))
            raise
        else:
            self._prefills.published(job.attempt)
            await self._apply_event(lambda ledger: ledger.published(job.attempt, sequence))

    async def carry_out(self, instructions: Sequence[Instruction]) -> None:
        """Carries out the instructions that need the network, once each. A lost message is
        safe, because no writer gets a claim for a withdrawn attempt."""
        for instruction in instructions:
            try:
                if isinstance(instruction, DeleteJob) and self._queue is not None:
                    await self._queue.delete(instruction.sequence)
                elif isinstance(instruction, CancelWriter) and self._messaging is not None:
                    await self._messaging.publish(
                        names.cancel_subject(self._config.namespace, instruction.writer_lease_id),
                        encode_sealed(
                            CancelAttempt(
                                attempt=instruction.attempt, engine_id=self._config.engine_id
                            )
                        ),
                    )
            except DynamoLiteError as exc:
                logger.warning("instruction %s failed: %s", instruction, exc)

    async def _apply_event(self, event: Callable[[Ledger], list[Instruction]]) -> None:
        with self._book.lock:
            instructions = event(self._book.ledger)
            self._book.leave_for_engine(instructions)
        await self.carry_out(instructions)

    async def _on_claim(self, payload: bytes) -> bytes:
        claim = decode_claim(payload)
        if not self.workers.is_registered(claim.writer_lease_id):
            # Nothing would report when it is gone. Its record may only be late.
            self._on_drop("claim")
            return encode(ClaimRefused(reason="no such prefill worker", elsewhere=True))
        # A worker with a heartbeat that reports an unhealthy engine would only hold the job.
        self.workers.show_life(claim.writer_lease_id)
        if trouble := self.workers.trouble(claim.writer_lease_id):
            return encode(ClaimRefused(reason=f"not able to work: {trouble}", elsewhere=True))
        grant = self._granting.answer(claim, self._now())
        if isinstance(grant, Refusal):
            if not grant.elsewhere:
                self._on_drop("claim")
            return encode(ClaimRefused(reason=grant.reason, elsewhere=grant.elsewhere))
        self._prefills.claimed(claim.attempt, claim.held_s)
        self.backlog.changed()
        return encode(Granted(granted_at=self._wall(), grant=grant))

    async def _on_done(self, payload: bytes) -> None:
        done = decode_writer_done(payload)
        written = done.outcome == "written"
        if not written:
            with self._book.lock:
                request_id = self._book.ledger.request(done.attempt)
            about = request_id, done.attempt, done.outcome, done.detail
            logger.info("request %s: attempt %s: its writer reports %s: %s", *about)
        writer = done.writer_lease_id
        self._check_writer(done.attempt, writer)
        self._prefills.writer_done(done.attempt, done.took_s if written else None)
        if done.outcome == "died":
            now = self._now()
            await self._apply_event(lambda ledger: ledger.writer_died(done.attempt, writer, now))
        else:
            outcome = self._outcome_of(done)
            await self._apply_event(
                lambda ledger: ledger.writer_done(
                    done.attempt,
                    writer,
                    written=written,
                    number=done.number,
                    outcome=outcome,
                    detail=done.detail[:_MAX_DETAIL],
                )
            )

    def _outcome_of(self, done: WriterDone) -> Outcome:
        """The outcome of a remote prefill that its writer did not write."""
        # A worker with a failed link does not count among those that may compute the rest.
        if self.workers.link_trouble(done.writer_lease_id):
            return Outcome.WRITER_UNUSABLE
        return Outcome.WRITER_ABANDONED if done.outcome == "abandoned" else Outcome.WRITER_FAILED

    async def _on_describe(self, _payload: bytes) -> bytes | None:
        status = self._status()
        return None if status is None else encode(status)

    async def _on_explain(self, payload: bytes) -> bytes:
        return self._prefills.decisions.answer(payload)

    async def _on_stays(self, payload: bytes) -> bytes:
        """A writer that gets a refusal, or no answer, stops writing."""
        stays = decode_writer_stays(payload)
        writer = stays.writer_lease_id
        with self._book.lock:
            ledger = self._book.ledger
            request_id, holder = ledger.request(stays.attempt), ledger.writer(stays.attempt)
            refusal = ledger.writer_stays(
                stays.attempt, writer, stays.for_s, self._now(), stays.number
            )
        if refusal is None:
            return encode(StayAccepted())
        if holder not in (None, writer):
            self._on_drop("writer_stays")
        what = request_id, stays.attempt, writer, refusal.reason
        logger.info("request %s: attempt %s: writer %x must stop writing: %s", *what)
        return encode(StayRefused(reason=refusal.reason))

    async def _on_leave(self, payload: bytes) -> bytes:
        """The component announces its shutdown: its keys may vanish for other reasons."""
        if decode_leave(payload).lease_id != self._config.lease_id:
            raise ProtocolError("leave message with the lease id of another worker")
        self.leaving = True
        await self._apply_event(lambda ledger: ledger.withdraw_queued(Outcome.LEAVING))
        return b""

    async def _on_poll(self, payload: bytes) -> bytes:
        self.listening.extend(decode_listen(payload))
        return b""

    def _check_writer(self, attempt: str, writer_lease_id: int) -> None:
        """Raises ProtocolError if another writer holds the attempt."""
        with self._book.lock:
            holder = self._book.ledger.writer(attempt)
        if holder not in (None, writer_lease_id):
            raise ProtocolError(
                f"attempt {attempt} is held by another writer than {writer_lease_id:x}"
            )

    def _on_writers(self, joined: frozenset[int], left: frozenset[int]) -> None:
        with self._book.lock:
            for lease_id in joined:
                self._book.ledger.writer_back(lease_id)
            now = self._now()
            unfinished = [i for i in left if self._book.ledger.writer_gone(i, now)]
        for lease_id in unfinished:
            self._start(self._check_ended(lease_id))
        self.workers.forget_links(left)
        self._on_usable_change()

    async def _check_ended(self, writer_lease_id: int) -> None:
        """Tells a dead writer from a leaving one, which has a while to promise that it stays."""
        assert self._messaging is not None
        subject = names.alive_subject(self._config.namespace, writer_lease_id)
        try:
            await self._messaging.request(subject, b"", timeout_s=_ALIVE_TIMEOUT_S)
        except NoResponders:
            # A killed process's subscriptions end with its TCP connection to the broker.
            if not self.workers.is_registered(writer_lease_id):
                with self._book.lock:
                    self._book.ledger.writer_ended(writer_lease_id, self._now())
        except DynamoLiteError as exc:
            logger.debug("writer %x: no answer whether it still runs: %s", writer_lease_id, exc)

    def _on_health(self, back: frozenset[int], lost: frozenset[int]) -> None:
        for lease_id in lost:
            self._apply_event_soon(lambda ledger, writer=lease_id: ledger.writer_silent(writer))
        self._on_usable_change()

    def _on_queue_lost(self) -> None:
        """The queued jobs are lost: no writer would claim them before their deadlines."""
        self._apply_event_soon(lambda ledger: ledger.withdraw_queued(Outcome.QUEUE_LOST))

    def _on_usable_change(self) -> None:
        self.queue_watch.workers_changed()
        self.workers.warn_if_none_usable()
        if not self.workers.usable:
            self._apply_event_soon(lambda ledger: ledger.withdraw_queued(Outcome.NO_WRITER))

    def _apply_event_soon(self, event: Callable[[Ledger], list[Instruction]]) -> None:
        self._start(self._apply_event(event))

    def _start(self, coro: Coroutine[Any, Any, None]) -> None:
        if self._tasks is not None:
            self._tasks.create_task(coro)
        else:  # the session is being closed
            coro.close()

    @property
    def queue_jobs(self) -> int | None:
        """From the last reading of the queue; None if that is too old."""
        view = fresh(self.queue_watch.view, self._tuning.now.options, self._now())
        return None if view is None else view.jobs

    @property
    def options_version(self) -> int:
        """Of the live options that this engine follows."""
        return self._tuning.now.version
