"""The decode engine's network side: opens its connections, pushes jobs, answers its component.

It runs on the bridge's event loop and shares the ledger with the scheduler half under one
lock. `ledger_events.py` tells the ledger what has happened, `writer_events.py` handles what
comes from writers.
"""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from dynamo_lite.disagg.attempts.instructions import Outcome
from dynamo_lite.disagg.decode.granting import Granting
from dynamo_lite.disagg.decode.ledger_events import LedgerEvents
from dynamo_lite.disagg.decode.live_thresholds import LiveThresholds
from dynamo_lite.disagg.decode.prefill_workers import PrefillWorkers
from dynamo_lite.disagg.decode.queue_watch import QueueWatch
from dynamo_lite.disagg.decode.remote_prefills import RemotePrefills
from dynamo_lite.disagg.decode.shared_state import LockedLedger
from dynamo_lite.disagg.decode.writer_events import WriterEvents
from dynamo_lite.disagg.engine_config import DecodeEngineConfig, EngineConfig
from dynamo_lite.disagg.queue.base import PrefillQueue
from dynamo_lite.disagg.server_clients import ServerClients
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import (
    BrokerUnavailable,
    ProtocolError,
    PushAmbiguous,
    QueueFull,
)
from dynamo_lite.protocol.grant import blocks_digest
from dynamo_lite.protocol.prefill import EngineStatus, RemotePrefillRequest, decode_leave
from dynamo_lite.runtime.clock import Clock
from dynamo_lite.runtime.drops import OnDrop, counted, uncounted
from dynamo_lite.runtime.members.live_options import LiveOptions
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.tasks import needed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Connected:
    """What a session has while its connections are open."""

    queue: PrefillQueue
    events: LedgerEvents
    writer_events: WriterEvents


class ControlSession:
    """Use `session()` as the bridge's context.

    status: returns the reply to `describe`; called on the bridge's thread. live: follows the
    live options of the engine's component. new_grant: returns a new grant's id, above 0.
    """

    def __init__(
        self,
        config: EngineConfig,
        book: LockedLedger,
        prefills: RemotePrefills,
        status: Callable[[], EngineStatus | None],
        live: LiveThresholds,
        *,
        clients: ServerClients,
        new_grant: Callable[[], int],
        clock: Clock,
        on_drop: OnDrop = uncounted,
    ):
        assert isinstance(config.role, DecodeEngineConfig)
        self._config, self._role, self._book, self._status = config, config.role, book, status
        self._prefills, self._clients, self._live = prefills, clients, live
        self._clock, self._on_drop = clock, on_drop
        self.workers = PrefillWorkers(config, on_drop)
        self.queue_watch = QueueWatch(config, self.workers, live, clock.monotonic, on_drop)
        self._granting = Granting(book, config.engine_id, new_grant)
        #: None until the session is open: before that nothing is submitted to the bridge.
        self._connected: _Connected | None = None
        #: Whether the component has announced that it shuts down.
        self.leaving = False

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        """Raises the failure of a loop without which the engine would work with what it knew."""
        config = self._config
        subject = config.namespace, config.engine_id
        async with contextlib.AsyncExitStack() as stack:
            enter = stack.enter_async_context
            on_failure = await enter(needed())
            messaging = await enter(self._clients.messaging())
            queue = await enter(self._clients.queue(self._role.queue))
            self._connected = connected = self._connect(queue, messaging)
            writer_events = connected.writer_events
            store = await enter(self._clients.store())
            options = LiveOptions(
                store,
                config.namespace,
                self._role.component,
                on_change=self._live.change,
                on_drop=self._on_drop,
            )
            await enter(options.following(on_failure))
            await enter(self.workers.follow(store, messaging, self._on_usable_change, on_failure))
            await enter(writer_events.serving())
            for name, where, handler in (
                (names.leave_subject, "leave", self._on_leave),
                (names.describe_subject, "describe", self._on_describe),
                (names.explain_subject, "explain", self._on_explain),
            ):
                handler = counted(handler, where, self._on_drop)
                await enter(messaging.serve(name(*subject), handler))
            await enter(self.queue_watch.running(queue, messaging, on_failure))
            async with connected.events.running(on_failure):
                self.workers.listen(writer_events.on_members, writer_events.on_health)
                with queue.on_lost(self._on_queue_lost):
                    yield

    @property
    def events(self) -> LedgerEvents:
        """Of the open session."""
        assert self._connected is not None
        return self._connected.events

    async def push(self, job: RemotePrefillRequest) -> None:
        """Queues the job. If the broker does not confirm it, the prompt is computed locally."""
        assert self._connected is not None
        blocks = blocks_digest(job.block_ids, job.prefix_block_ids)
        with self._book.lock:
            self._book.ledger.offered(job.attempt, blocks)
        about = "request %s: attempt %s", job.request_id, job.attempt
        if not self.workers.usable:
            await self.events.apply(lambda ledger: ledger.not_published(job.attempt), *about)
            return
        try:
            lane = self._role.queue.lane_of(job.tokens_to_compute, job.priority)
            payload = encode(job)
            sequence = await self._connected.queue.push(payload, message_id=job.attempt, lane=lane)
        except (QueueFull, BrokerUnavailable, PushAmbiguous) as exc:
            logger.info(
                "request %s: computed locally, the job was not queued: %s", job.request_id, exc
            )
            if not isinstance(exc, QueueFull):
                self.queue_watch.doubt()
            await self.events.apply(lambda ledger: ledger.not_published(job.attempt), *about)
        except Exception as exc:
            logger.error(
                "request %s: computed locally, queueing the job failed: %r", job.request_id, exc
            )
            await self.events.apply(lambda ledger: ledger.not_published(job.attempt), *about)
            raise
        else:
            self._prefills.published(job.attempt)
            self.queue_watch.pushed(job.tokens_to_compute, len(payload))
            await self.events.apply(lambda ledger: ledger.published(job.attempt, sequence), *about)

    def _connect(self, queue: PrefillQueue, messaging: Messaging) -> _Connected:
        events = LedgerEvents(self._config, self._book, queue, messaging)
        writer_events = WriterEvents(
            self._config,
            self._book,
            events,
            self._prefills,
            self.workers,
            self._granting,
            messaging,
            self._clock,
            self._on_drop,
            self._on_usable_change,
        )
        return _Connected(queue, events, writer_events)

    async def _on_describe(self, _payload: bytes) -> bytes | None:
        status = self._status()
        return None if status is None else encode(status)

    async def _on_explain(self, payload: bytes) -> bytes:
        return self._prefills.decisions.answer(payload)

    async def _on_leave(self, payload: bytes) -> bytes:
        """The component announces its shutdown: its keys may vanish for other reasons."""
        if decode_leave(payload).lease_id != self._config.lease_id:
            raise ProtocolError("leave message with the lease id of another worker")
        self.leaving = True
        await self.events.apply(
            lambda ledger: ledger.withdraw_queued(Outcome.LEAVING), "the worker leaves"
        )
        return b""

    def _on_queue_lost(self) -> None:
        """The queued jobs are lost: no writer would claim them before their deadlines."""
        self.events.apply_soon(
            lambda ledger: ledger.withdraw_queued(Outcome.QUEUE_LOST), "the queue is lost"
        )

    def _on_usable_change(self) -> None:
        self.queue_watch.workers_changed()
        self.workers.warn_if_none_usable()
        if not self.workers.usable:
            self.events.apply_soon(
                lambda ledger: ledger.withdraw_queued(Outcome.NO_WRITER), "no writer is usable"
            )
