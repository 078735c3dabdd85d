"""The scheduler half of a decode engine.

The engine calls it for every new prompt, with the exact prefix-cache hit. It decides
local or remote, hands the job over once blocks are allocated, and lets the engine continue
when the KV has arrived or has been given up. All methods run on the engine's thread and never
block. In each step it takes what the bridge has left in the inbox, and tells the bridge what has
happened at the engine.
"""

import logging
import uuid
from collections import deque
from collections.abc import Callable, Iterable

from dynamo_lite.disagg.attempts.ledger import Ended, Ledger, Outcome, Release
from dynamo_lite.disagg.bridge import OpenBridge, ServerClients
from dynamo_lite.disagg.counters import Counters
from dynamo_lite.disagg.decode.attempt_events import Claimed, Inbox, LedgerEvent
from dynamo_lite.disagg.decode.control_session import ControlSession, StepEvents
from dynamo_lite.disagg.decode.decision_log import DecisionLog
from dynamo_lite.disagg.decode.prompts import Prompts
from dynamo_lite.disagg.decode.remote_prefills import RemotePrefills
from dynamo_lite.disagg.decode.resume import CacheBlocks, Resumes
from dynamo_lite.disagg.decode.single_flight import SingleFlight
from dynamo_lite.disagg.engine_api import BlockPool, BlockTables, Prompt
from dynamo_lite.disagg.engine_config import DecodeEngineConfig, EngineConfig
from dynamo_lite.disagg.messages import DecodeStep, RankResults, WorkerReport
from dynamo_lite.protocol.health import EngineStatus
from dynamo_lite.protocol.prefill import RemotePrefillRequest
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.runtime.clock import SYSTEM_CLOCK, Clock

logger = logging.getLogger(__name__)


class DecodeScheduler:
    """block_size: in tokens. cache: see `Resumes`. new_attempt: returns a new id.
    hash_block_size: see `SingleFlight`. overlapping_steps: how many steps the engine may have in
    flight."""

    def __init__(
        self,
        config: EngineConfig,
        block_size: int,
        pool: BlockPool,
        *,
        clients: ServerClients,
        open_bridge: OpenBridge,
        clock: Clock = SYSTEM_CLOCK,
        ledger: Ledger | None = None,
        new_attempt: Callable[[], str] = lambda: uuid.uuid4().hex,
        cache: CacheBlocks | None = None,
        hash_block_size: int | None = None,
        overlapping_steps: int = 1,
    ):
        assert isinstance(config.role, DecodeEngineConfig)
        self._pool, self._now = pool, clock.monotonic
        self.stats = stats = Counters()
        log = DecisionLog(config, self._now)
        self.prefills = prefills = RemotePrefills(stats, log, self._now)
        self._ledger = ledger or Ledger(landing_s=config.lease_ttl_s)
        self._inbox: Inbox = Inbox()
        self._net = net = ControlSession(
            config,
            self._ledger,
            self._inbox,
            status=self._status,
            explain=log.answer,
            clients=clients,
            clock=clock,
            on_drop=stats.drop,
        )
        self.bridge = open_bridge(net.session)
        self._flights = flights = SingleFlight(block_size, hash_block_size, prefills, stats)
        self._resumes = Resumes(block_size, stats, lambda: net.workers.usable, cache)
        self._prompts = Prompts(
            config.engine_id,
            block_size,
            pool,
            prefills,
            flights,
            net,
            clock=clock,
            new_attempt=new_attempt,
            overlapping_steps=overlapping_steps,
        )
        #: Set before the bridge starts, when all ranks are open.
        self.metadata: EngineMetadata | None = None
        #: For each step in flight: whether another connector reads blocks in it, and the jobs that
        #: are published when it has ended.
        self._in_use = deque[bool](maxlen=overlapping_steps)
        self._later = deque(list[RemotePrefillRequest]() for _ in range(overlapping_steps))
        #: For the ledger, since the last step.
        self._events: list[LedgerEvent] = []
        #: What the next step tells the ranks.
        self._message = DecodeStep()
        self._stepped_at = self._now()

    def num_new_matched_tokens(
        self, request: Prompt, cached: int, *, transferable: bool = True, offloaded: int = 0
    ) -> tuple[int | None, bool]:
        """How many tokens beyond `cached` a prefill worker will compute, and whether the
        request waits for them.

        Never the last prompt token: the engine computes it in order to sample. None: the
        engine must call again, because the request waits for the KV of another request.
        transferable: whether the prompt's KV depends on its tokens and cache salt only.
        offloaded: tokens beyond `cached` that another connector loads if none are returned.
        """
        return self._prompts.decide(request, cached, transferable, offloaded)

    def leader_of(self, request_id: str) -> str | None:
        """The parked request for whose KV the request waits; None if there is none, so that the
        engine must call `num_new_matched_tokens`."""
        return self._flights.leader_of(request_id)

    def state_after_alloc(self, request: Prompt, tables: BlockTables, external: int) -> None:
        """The engine has reserved the prompt's blocks. Requests the KV of `external` tokens."""
        begin = self._prompts.start(request, tables, external)
        if begin is not None:
            self._events.append(begin)

    def build_step(self, filling: Iterable[int] = (), *, in_use: bool = False) -> DecodeStep:
        """Called in every step. filling: blocks that this step completes; the prefix cache has them
        already. in_use: whether another connector reads blocks until this step has ended that
        this step's prompts, or the next one's, may have: no writer may have them before."""
        self._stepped_at = self._now()
        # Also when blocks are released: what has arrived for them is taken before their reuse.
        self._message.poll = self.prefills.jobs > 0 or self.prefills.unsettled
        jobs = self._prompts.step(filling)
        for job in jobs:
            self._message.expect[job.attempt] = job.request_id
            self._message.blocks[job.attempt] = tuple(job.block_ids)
        self._in_use.append(in_use)
        held = any(self._in_use)
        self._later.append(jobs if held else [])
        jobs = [*self._later.popleft(), *([] if held else jobs)]
        self._take_inbox()
        if self._events or jobs:
            events, self._events = self._events, []
            self.bridge.submit(self._net.stepped(StepEvents(events, jobs)))
        message, self._message = self._message, DecodeStep()
        return message

    def worker_output(self, results: RankResults, report: WorkerReport | None = None) -> None:
        """The worker halves report which requests have received their KV or lost it."""
        for request_id, blocks in report.landed.items() if report is not None else ():
            self.prefills.landed(request_id, blocks)
        for request_id, cached in report.cached.items() if report is not None else ():
            self.prefills.committed(request_id, cached)
        for request_id in sorted(results.received | results.lost):
            self._transferred(request_id, received=request_id not in results.lost)

    def cached_tokens(self, request_id: str) -> int | None:
        """Prompt tokens that no engine computes for the request; None without a remote prefill."""
        prefill = self.prefills.by_request.get(request_id)
        return None if prefill is None or not prefill.tries else prefill.cached_tokens

    def request_finished(self, request_id: str) -> None:
        """The request has ended, with its KV or without."""
        prefill = self.prefills.by_request.get(request_id)
        self._prompts.finished(request_id)
        if prefill is not None and prefill.attempt and prefill.outcome is None:
            attempt = prefill.attempt
            self._events.append(lambda ledger: ledger.finished(attempt))

    @property
    def awaits_kv_s(self) -> float | None:
        """Seconds since the last remote prefill was requested; None if no request waits for KV."""
        return None if self.prefills.jobs == 0 else self._now() - self.prefills.last_asked_at

    @property
    def busy(self) -> bool:
        """Whether the engine must make steps even without requests."""
        return bool(self._message.give_up or self._events or self.prefills.unsettled)

    def _take_inbox(self) -> None:
        """Carries out what the bridge has left for this step."""
        while self._inbox:
            match self._inbox.popleft():
                case Release(attempt):
                    self._pool.free_blocks(reversed(self.prefills.release(attempt)))
                case Ended(request_id, attempt, outcome, detail):
                    if self.prefills.ended(attempt, outcome, detail) is not None:
                        self._message.give_up.append((attempt, request_id))
                        logger.info(
                            "request %s: attempt %s ended: %s", request_id, attempt, outcome.value
                        )
                case event:
                    if isinstance(event, Claimed):
                        self._message.claims[event.attempt] = event.claim
                    self.prefills.note(event)

    def _transferred(self, request_id: str, *, received: bool) -> None:
        prefill = self.prefills.unparked(request_id, received=received)
        if prefill is None:
            return
        attempt = prefill.attempt
        outcome = Outcome.COMMITTED if received else Outcome.CORRUPT
        if self.prefills.ended(attempt, outcome) is not None:
            # All ranks have the commits of all writers, or said so of others: no write follows.
            self._events.append(lambda ledger: ledger.received(attempt))
        if not received:
            self._resumes.lost(prefill, self._now())

    def _status(self) -> EngineStatus | None:
        """Runs on the bridge's thread."""
        if self.metadata is None:
            return None
        ledger, net, now = self._ledger, self._net, self._now()
        view = net.queue_watch.view
        if view is not None and now - view.read_at > net.options.queue_view_max_age_s:
            view = None
        return EngineStatus(
            metadata=self.metadata,
            free_blocks=self._pool.get_num_free_blocks(),
            total_blocks=self._pool.num_gpu_blocks,
            waiting=ledger.waiting,
            waiting_tokens=self.prefills.tokens,
            quarantined=ledger.quarantined,
            queue_jobs=None if view is None else view.jobs,
            queue_tokens=None if view is None else view.tokens,
            last_step_age_s=now - self._stepped_at,
            unresponsive_writers=net.workers.unresponsive,
            unusable_writers=net.workers.unusable,
            writers=sorted(ledger.writers),
        )
