"""The decode engine's network side: opens its connections, pushes jobs, answers its component.

It runs on the bridge's event loop. `attempt_events.py` has the ledger, and answers writers.
"""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from dynamo_lite.disagg.attempts.ledger import Ledger, Outcome
from dynamo_lite.disagg.bridge import ServerClients
from dynamo_lite.disagg.decode.attempt_events import AttemptEvents, Inbox, LedgerEvent
from dynamo_lite.disagg.decode.prefill_workers import PrefillWorkers
from dynamo_lite.disagg.decode.queue_watch import QueueWatch
from dynamo_lite.disagg.engine_config import DecodeEngineConfig, EngineConfig
from dynamo_lite.disagg.queue.base import PrefillQueue
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import (
    BrokerUnavailable,
    ProtocolError,
    QueueFull,
)
from dynamo_lite.protocol.health import EngineStatus, decode_leave
from dynamo_lite.protocol.live_options import Values, applied
from dynamo_lite.protocol.prefill import RemotePrefillRequest
from dynamo_lite.runtime.clock import Clock
from dynamo_lite.runtime.drops import OnDrop, counted, uncounted
from dynamo_lite.runtime.members.live_options import LiveOptions
from dynamo_lite.runtime.tasks import needed

logger = logging.getLogger(__name__)


class ControlSession:
    """Use `session()` as the bridge's context.

    inbox: for the engine's thread. status: returns the reply to `describe`. explain: answers an
    `Explain`.
    """

    def __init__(
        self,
        config: EngineConfig,
        ledger: Ledger,
        inbox: Inbox,
        *,
        status: Callable[[], EngineStatus | None],
        explain: Callable[[bytes], bytes],
        clients: ServerClients,
        clock: Clock,
        on_drop: OnDrop = uncounted,
    ):
        assert isinstance(config.role, DecodeEngineConfig)
        self._config, self._role, self._ledger, self._inbox = config, config.role, ledger, inbox
        self._status, self._explain = status, explain
        #: The config file's, overridden by live options. The bridge's thread replaces it as a
        #: whole; a decision reads it once.
        self.options = config.role.options
        self._clients, self._on_drop = clients, on_drop
        self._now, self._wall = clock.monotonic, clock.wall
        self.workers = PrefillWorkers(config, on_drop)
        self.queue_watch = QueueWatch(clock.monotonic)
        #: None until the session is open: before that nothing is submitted to the bridge.
        self._queue: PrefillQueue | None = None
        self._attempts: AttemptEvents | None = None
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
            self._queue = queue = await enter(self._clients.queue(self._role.queue))
            self._attempts = attempts = AttemptEvents(
                self._ledger, self._inbox, queue, self.workers, self._now, self._on_drop
            )
            store = await enter(self._clients.store())
            options = LiveOptions(
                store,
                config.namespace,
                self._role.component,
                on_change=self._on_options,
                on_drop=self._on_drop,
            )
            await enter(options.following(on_failure))
            await enter(self.workers.follow(store, messaging, self._on_usable_change, on_failure))
            for name, where, handler in (
                (names.claim_subject, "claim", attempts.on_claim),
                (names.done_subject, "done", attempts.on_done),
                (names.leave_subject, "leave", self._on_leave),
                (names.describe_subject, "describe", self._on_describe),
                (names.explain_subject, "explain", self._on_explain),
            ):
                handler = counted(handler, where, self._on_drop)
                await enter(messaging.serve(name(*subject), handler))
            await enter(self.queue_watch.running(queue, on_failure))
            async with attempts.running(on_failure):
                self.workers.listen(self._on_members, self._on_health)
                yield

    async def stepped(
        self, events: Sequence[LedgerEvent], jobs: Sequence[RemotePrefillRequest]
    ) -> None:
        """The engine has made a step. events: of attempts, in order. jobs: to be queued."""
        attempts = self.attempts
        for event in events:
            attempts.apply(event)
        for job in jobs:
            attempts.start(self._push(job), f"push {job.attempt}")

    @property
    def attempts(self) -> AttemptEvents:
        """Of the open session."""
        assert self._attempts is not None
        return self._attempts

    async def _push(self, job: RemotePrefillRequest) -> None:
        """Queues the job. If the broker does not confirm it, the prompt is computed locally."""
        assert self._queue is not None
        attempt, apply = job.attempt, self.attempts.apply
        if not self.workers.usable:
            apply(lambda ledger: ledger.not_published(attempt))
            return
        try:
            lane = self._role.queue.lane_of(job.tokens_to_compute, job.priority)
            payload = encode(job)
            sequence = await self._queue.push(
                payload, message_id=attempt, lane=lane, life_s=job.deadline - self._wall()
            )
        except Exception as exc:
            if not isinstance(exc, QueueFull | BrokerUnavailable):
                logger.exception("request %s: queueing the job failed", job.request_id)
            why = "request %s: computed locally, the job was not queued: %s"
            logger.info(why, job.request_id, exc)
            apply(lambda ledger: ledger.not_published(attempt))
        else:
            self.queue_watch.pushed(job.tokens_to_compute, len(payload))
            apply(lambda ledger: ledger.published(attempt, sequence, lane))

    def _on_options(self, values: Values) -> None:
        self.options = applied(values, self._role.options)

    async def _on_describe(self, _payload: bytes) -> bytes | None:
        status = self._status()
        return None if status is None else encode(status)

    async def _on_explain(self, payload: bytes) -> bytes:
        return self._explain(payload)

    async def _on_leave(self, payload: bytes) -> bytes:
        """The component announces its shutdown: its keys may vanish for other reasons."""
        if decode_leave(payload).lease_id != self._config.lease_id:
            raise ProtocolError("leave message with the lease id of another worker")
        self.leaving = True
        self._withdraw_queued(Outcome.LEAVING)
        return b""

    def _on_members(self, _joined: frozenset[int], left: frozenset[int]) -> None:
        """These workers have registered, and those have left."""
        self.attempts.on_left(left)
        self._on_usable_change()

    def _on_health(self, _back: frozenset[int], lost: frozenset[int]) -> None:
        """These workers respond again, and those do not any more."""
        self.attempts.on_silent(lost)
        self._on_usable_change()

    def _on_usable_change(self) -> None:
        if not self.workers.usable:
            self._withdraw_queued(Outcome.NO_WRITER)

    def _withdraw_queued(self, outcome: Outcome) -> None:
        self.attempts.apply(lambda ledger: ledger.withdraw_queued(outcome))
