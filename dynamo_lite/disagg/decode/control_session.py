"""The decode engine's connections to NATS, etcd and the queue, as the bridge's session.

It follows the prefill workers, the queue and the live options, takes the messages of writers and of
the component, and answers questions. Runs on the bridge's event loop.
"""

import contextlib
from collections.abc import AsyncIterator, Callable

from dynamo_lite.disagg.attempts.ledger import Ledger, Outcome
from dynamo_lite.disagg.decode.attempt_events import AttemptEvents
from dynamo_lite.disagg.decode.decision_log import explained
from dynamo_lite.disagg.decode.prefill_workers import PrefillWorkers
from dynamo_lite.disagg.decode.queue_watch import QueueWatch
from dynamo_lite.disagg.decode.remote_prefills import RemotePrefills
from dynamo_lite.disagg.engine_api import BlockPool
from dynamo_lite.disagg.engine_config import DecodeEngineConfig, EngineConfig
from dynamo_lite.disagg.server_clients import ServerClients
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.health import EngineStatus, decode_leave
from dynamo_lite.protocol.live_options import Values, applied
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.runtime.clock import Clock
from dynamo_lite.runtime.drops import OnDrop, counted
from dynamo_lite.runtime.members.live_options import LiveOptions
from dynamo_lite.runtime.tasks import OwnedTasks, needed, running


class ControlSession:
    """Use `session()` as the bridge's context.

    engine: returns the engine's metadata, None before all ranks are open, and when its last step
    was, in monotonic seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        ledger: Ledger,
        pool: BlockPool,
        prefills: RemotePrefills,
        *,
        engine: Callable[[], tuple[EngineMetadata | None, float]],
        clients: ServerClients,
        clock: Clock,
        on_drop: OnDrop,
    ):
        assert isinstance(config.role, DecodeEngineConfig)
        self._config, self._role = config, config.role
        self._pool, self._prefills, self._engine = pool, prefills, engine
        #: The config file's, overridden by live options. The bridge's thread replaces it as a
        #: whole; a decision reads it once.
        self.options = config.role.options
        self._clients, self._on_drop, self._now = clients, on_drop, clock.monotonic
        self.workers = PrefillWorkers(config, on_drop)
        self.queue_watch = QueueWatch(clock.monotonic)
        short_length = config.role.queue.short_length
        self.attempts = AttemptEvents(
            ledger, self.workers, self.queue_watch, short_length, clock, on_drop
        )
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
            queue = await enter(self._clients.queue(self._role.queue))
            store = await enter(self._clients.store())
            options = LiveOptions(
                store,
                config.namespace,
                self._role.component,
                on_change=self._on_options,
                on_drop=self._on_drop,
            )
            await enter(options.following(on_failure))
            changed = self.attempts.workers_changed
            await enter(self.workers.follow(store, messaging, changed, on_failure))
            for name, where, handler in (
                (names.claim_subject, "claim", self.attempts.on_claim),
                (names.done_subject, "done", self.attempts.on_done),
                (names.leave_subject, "leave", self._on_leave),
                (names.describe_subject, "describe", self._on_describe),
                (names.explain_subject, "explain", self._on_explain),
            ):
                handler = counted(handler, where, self._on_drop)
                await enter(messaging.serve(name(*subject), handler))
            watch = self.queue_watch.watch(queue)
            await enter(running(watch, name="queue-view", on_failure=on_failure))
            tasks = await enter(OwnedTasks(on_failure))
            with self.attempts.session(queue, tasks):
                yield
            await tasks.join()

    async def _on_leave(self, payload: bytes) -> bytes:
        """The component announces its shutdown: its keys may vanish for other reasons."""
        if decode_leave(payload).lease_id != self._config.lease_id:
            raise ProtocolError("leave message with the lease id of another worker")
        self.leaving = True
        self.attempts.apply(lambda ledger: ledger.withdraw_queued(Outcome.LEAVING))
        return b""

    async def _on_describe(self, _payload: bytes) -> bytes | None:
        metadata, stepped_at = self._engine()
        if metadata is None:
            return None
        ledger, workers, now = self.attempts.ledger, self.workers, self._now()
        view, responsive = self.queue_watch.view, len(workers.responsive)
        if view is not None and now - view.read_at > self.options.queue_view_max_age_s:
            view = None
        status = EngineStatus(
            metadata=metadata,
            free_blocks=self._pool.get_num_free_blocks(),
            total_blocks=self._pool.num_gpu_blocks,
            waiting=ledger.waiting,
            waiting_tokens=self._prefills.tokens,
            quarantined=ledger.quarantined,
            queue_jobs=None if view is None else view.jobs,
            queue_tokens=None if view is None else view.tokens,
            last_step_age_s=now - stepped_at,
            unresponsive_writers=len(workers.roster.members) - responsive,
            unusable_writers=responsive - len(workers.usable),
            writers=sorted(ledger.writers),
        )
        return encode(status)

    async def _on_explain(self, payload: bytes) -> bytes:
        return explained(self._config, self._prefills.decisions, payload, self._now())

    def _on_options(self, values: Values) -> None:
        self.options = applied(values, self._role.options)
