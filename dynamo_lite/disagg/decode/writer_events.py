"""What a decode engine does when a writer claims, reports, promises, comes, leaves or falls silent.

A writer's messages are answered here. Who is registered and responsive is known by
`prefill_workers.py`.
"""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from dynamo_lite.disagg.attempts.attempt import Refusal
from dynamo_lite.disagg.attempts.instructions import Outcome
from dynamo_lite.disagg.decode.granting import Granting
from dynamo_lite.disagg.decode.ledger_events import LedgerEvents
from dynamo_lite.disagg.decode.prefill_workers import PrefillWorkers
from dynamo_lite.disagg.decode.remote_prefills import RemotePrefills
from dynamo_lite.disagg.decode.shared_state import LockedLedger
from dynamo_lite.disagg.engine_config import EngineConfig
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import DynamoLiteError, NoResponders, ProtocolError
from dynamo_lite.protocol.prefill import (
    ClaimRefused,
    Granted,
    StayAccepted,
    StayRefused,
    WriterDone,
    decode_claim,
    decode_writer_done,
    decode_writer_stays,
)
from dynamo_lite.runtime.clock import Clock
from dynamo_lite.runtime.drops import OnDrop, counted
from dynamo_lite.runtime.messaging import Messaging

logger = logging.getLogger(__name__)

#: How long a writer whose keys are gone has to answer that its process still runs.
_ALIVE_TIMEOUT_S = 1.0
#: How many characters of a writer's failure message are kept for `explain`.
_MAX_DETAIL = 500


class WriterEvents:
    """Runs on the bridge's thread. on_usable_change: called when other workers are usable than
    before."""

    def __init__(
        self,
        config: EngineConfig,
        book: LockedLedger,
        events: LedgerEvents,
        prefills: RemotePrefills,
        workers: PrefillWorkers,
        granting: Granting,
        messaging: Messaging,
        clock: Clock,
        on_drop: OnDrop,
        on_usable_change: Callable[[], None],
    ):
        self._namespace, self._engine_id = config.namespace, config.engine_id
        self._book, self._events, self._prefills = book, events, prefills
        self._workers, self._granting = workers, granting
        self._messaging, self._clock, self._on_drop = messaging, clock, on_drop
        self._on_usable_change = on_usable_change

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Answers writers' messages."""
        async with contextlib.AsyncExitStack() as stack:
            for name, where, handler in (
                (names.claim_subject, "claim", self.on_claim),
                (names.writer_done_subject, "writer_done", self.on_done),
                (names.writer_stays_subject, "writer_stays", self.on_stays),
            ):
                subject = name(self._namespace, self._engine_id)
                handler = counted(handler, where, self._on_drop)
                await stack.enter_async_context(self._messaging.serve(subject, handler))
            yield

    def on_members(self, joined: frozenset[int], left: frozenset[int]) -> None:
        """These workers have registered, and those have left."""
        with self._book.lock:
            for lease_id in joined:
                self._book.ledger.writer_back(lease_id)
            now = self._clock.monotonic()
            unfinished = [i for i in left if self._book.ledger.writer_gone(i, now)]
        for lease_id in unfinished:
            self._events.start(self._check_ended(lease_id), f"writer {lease_id:x} has left")
        self._workers.forget_links(left)
        self._on_usable_change()

    def on_health(self, back: frozenset[int], lost: frozenset[int]) -> None:
        """These workers respond again, and those do not any more."""
        for lease_id in lost:
            self._events.apply_soon(
                lambda ledger, writer=lease_id: ledger.writer_silent(writer),
                "writer %x is silent",
                lease_id,
            )
        self._on_usable_change()

    async def on_claim(self, payload: bytes) -> bytes:
        """A writer claims an attempt. Returns the encoded grant, or why there is none."""
        claim = decode_claim(payload)
        if not self._workers.is_registered(claim.writer_lease_id):
            # Nothing would report when it is gone. Its record may only be late.
            self._on_drop("claim")
            return encode(ClaimRefused(reason="no such prefill worker", elsewhere=True))
        # A worker with a heartbeat that reports an unhealthy engine would only hold the job.
        self._workers.show_life(claim.writer_lease_id)
        if trouble := self._workers.trouble(claim.writer_lease_id):
            return encode(ClaimRefused(reason=f"not able to work: {trouble}", elsewhere=True))
        grant = self._granting.answer(claim, self._clock.monotonic())
        if isinstance(grant, Refusal):
            if not grant.elsewhere:
                self._on_drop("claim")
            return encode(ClaimRefused(reason=grant.reason, elsewhere=grant.elsewhere))
        self._prefills.claimed(claim.attempt, claim.held_s)
        return encode(Granted(grant=grant))

    async def on_done(self, payload: bytes) -> None:
        """A writer reports that it is done. Raises ProtocolError if another holds the attempt."""
        done = decode_writer_done(payload)
        written = done.outcome == "written"
        with self._book.lock:
            request_id = self._book.ledger.request(done.attempt)
        about = "request %s: attempt %s", request_id, done.attempt
        if not written:
            what = request_id, done.attempt, done.outcome, done.detail
            logger.info("request %s: attempt %s: its writer reports %s: %s", *what)
        writer = done.writer_lease_id
        claimed = self._has_claimed(done.attempt, writer)
        self._prefills.writer_done(done.attempt, writer)
        if done.outcome == "died":
            now = self._clock.monotonic()
            await self._events.apply(
                lambda ledger: ledger.writer_died(done.attempt, writer, now), *about
            )
        else:
            outcome = self._outcome_of(done, claimed=claimed)
            await self._events.apply(
                lambda ledger: ledger.writer_done(
                    done.attempt,
                    writer,
                    written=written,
                    number=done.number,
                    outcome=outcome,
                    detail=done.detail[:_MAX_DETAIL],
                ),
                *about,
            )

    async def on_stays(self, payload: bytes) -> bytes:
        """A writer promises that it stays. If it gets a refusal, or no answer, it stops writing."""
        stays = decode_writer_stays(payload)
        writer = stays.writer_lease_id
        with self._book.lock:
            ledger, now = self._book.ledger, self._clock.monotonic()
            request_id, holder = ledger.request(stays.attempt), ledger.writer(stays.attempt)
            refusal = ledger.writer_stays(stays.attempt, writer, stays.for_s, now, stays.number)
        if refusal is None:
            return encode(StayAccepted())
        if holder not in (None, writer):
            self._on_drop("writer_stays")
        what = request_id, stays.attempt, writer, refusal.reason
        logger.info("request %s: attempt %s: writer %x must stop writing: %s", *what)
        return encode(StayRefused(reason=refusal.reason))

    def _has_claimed(self, attempt: str, writer_lease_id: int) -> bool:
        """Whether this writer holds the attempt. Raises ProtocolError if another one does."""
        with self._book.lock:
            holder = self._book.ledger.writer(attempt)
        if holder not in (None, writer_lease_id):
            raise ProtocolError(
                f"attempt {attempt} is held by another writer than {writer_lease_id:x}"
            )
        return holder is not None

    def _outcome_of(self, done: WriterDone, *, claimed: bool) -> Outcome:
        """The outcome of a remote prefill that its writer did not write."""
        if not claimed and self._workers.link_trouble(done.writer_lease_id):
            return Outcome.WRITER_UNUSABLE
        return Outcome.WRITER_ABANDONED if done.outcome == "abandoned" else Outcome.WRITER_FAILED

    async def _check_ended(self, writer_lease_id: int) -> None:
        """Tells a dead writer from a leaving one, which has a while to promise that it stays."""
        subject = names.alive_subject(self._namespace, writer_lease_id)
        try:
            await self._messaging.request(subject, b"", timeout_s=_ALIVE_TIMEOUT_S)
        except NoResponders:
            # A killed process's subscriptions end with its TCP connection to the broker.
            if not self._workers.is_registered(writer_lease_id):
                with self._book.lock:
                    self._book.ledger.writer_ended(writer_lease_id, self._clock.monotonic())
        except DynamoLiteError as exc:
            logger.debug("writer %x: no answer whether it still runs: %s", writer_lease_id, exc)
