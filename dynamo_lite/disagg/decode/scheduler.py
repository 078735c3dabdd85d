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
from functools import partial
from typing import Any

from msgspec import structs

from dynamo_lite.disagg.attempts.ledger import Ended, Ledger, Outcome, Release
from dynamo_lite.disagg.bridge import OpenBridge
from dynamo_lite.disagg.counters import Counters
from dynamo_lite.disagg.decision.rule import decide
from dynamo_lite.disagg.decode.attempt_events import Claimed, LedgerEvent
from dynamo_lite.disagg.decode.control_session import ControlSession
from dynamo_lite.disagg.decode.remote_prefill import WRITER_LOST, Decided, RemotePrefill, again
from dynamo_lite.disagg.decode.remote_prefills import RemotePrefills
from dynamo_lite.disagg.decode.single_flight import SingleFlight
from dynamo_lite.disagg.engine_api import BlockPool, BlockTables, Prompt
from dynamo_lite.disagg.engine_config import DecodeEngineConfig, EngineConfig
from dynamo_lite.disagg.messages import DecodeStep, RankResults, WorkerReport
from dynamo_lite.disagg.metrics import RESUME
from dynamo_lite.disagg.server_clients import ServerClients
from dynamo_lite.disagg.transfer_params import DecodeRequestParams, decode_params_of
from dynamo_lite.protocol.decisions import DecisionInputs, QueueSeen
from dynamo_lite.protocol.prefill import FirstTokenWanted, RemotePrefillRequest
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.runtime.clock import SYSTEM_CLOCK, Clock

logger = logging.getLogger(__name__)

#: Gives the blocks of the request's first tokens, as many as stated, to the prefix cache.
CacheBlocks = Callable[[Any, int], None]


class DecodeScheduler:
    """block_size: in tokens. cache: None where the engine caches no prefixes. new_attempt: returns
    a new id. hash_block_size: see `RemotePrefills`. overlapping_steps: how many steps the engine
    may have in flight."""

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
        self._engine_id, self._block_size, self._pool = config.engine_id, block_size, pool
        self._clock, self._now, self._new_attempt = clock, clock.monotonic, new_attempt
        self._cache = cache
        self.stats = stats = Counters()
        self.prefills = prefills = RemotePrefills(stats, self._now, hash_block_size)
        self._net = net = ControlSession(
            config,
            ledger or Ledger(landing_s=config.lease_ttl_s),
            pool,
            prefills,
            engine=lambda: (self.metadata, self._stepped_at),
            clients=clients,
            clock=clock,
            on_drop=stats.drop,
        )
        self._attempts = net.attempts
        self.bridge = open_bridge(net.session)
        self._flights = SingleFlight(block_size, prefills, stats)
        #: Set before the bridge starts, when all ranks are open.
        self.metadata: EngineMetadata | None = None
        #: The jobs of the step that is being scheduled.
        self._jobs: list[RemotePrefillRequest] = []
        #: For each step in flight: the blocks that it fills, whether another connector reads blocks
        #: in it, and the jobs that are published when it has ended.
        self._filling = deque[frozenset[int]](maxlen=overlapping_steps)
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
        transferable: see `DecisionInputs`.
        offloaded: tokens beyond `cached` that another connector loads if none are returned.
        """
        prefill = self.prefills.by_request.get(request.request_id)
        if prefill is not None and prefill.allocated and not prefill.may_retry:
            return 0, False
        if prefill is not None and self._flights.waits(prefill, cached):
            return None, False
        decided = self._decided(request, cached, transferable, prefill, offloaded)
        prefill = self.prefills.proposed(request, decided)
        if self.prefills.by_hash and self._flights.joins(request, prefill):
            return None, False
        if prefill.decided.reason.verdict == "local":
            return 0, False
        return request.num_prompt_tokens - 1 - cached, True

    def state_after_alloc(self, request: Prompt, tables: BlockTables, external: int) -> None:
        """The engine has reserved the prompt's blocks. Requests the KV of `external` tokens."""
        prefill = self.prefills.allocated(request)
        if prefill is None or not external:
            return
        job, until = self._begin(prefill, request, tables, external)
        self._jobs.append(job)
        queued_at, wait_s = prefill.times["decide"], prefill.decided.options.max_queue_wait_s
        self._events.append(
            lambda ledger: ledger.allocated(
                request.request_id, job.attempt, until, queued_at=queued_at, max_queue_wait_s=wait_s
            )
        )

    def build_step(self, filling: Iterable[int] = (), *, in_use: bool = False) -> DecodeStep:
        """Called in every step. filling: blocks that this step completes; the prefix cache has them
        already. in_use: whether another connector reads blocks until this step has ended that
        this step's prompts, or the next one's, may have: no writer may have them before."""
        self._stepped_at = self._now()
        # Also when blocks are released: what has arrived for them is taken before their reuse.
        self._message.poll = self.prefills.jobs > 0 or self.prefills.unsettled
        self._filling.append(frozenset(filling))
        jobs, self._jobs = [self._vouched(job) for job in self._jobs], []
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
            self.bridge.call(partial(self._attempts.stepped, events, jobs))
        message, self._message = self._message, DecodeStep()
        return message

    def worker_output(self, results: RankResults, report: WorkerReport | None = None) -> None:
        """The worker halves report which requests have received their KV or lost it."""
        for request_id, blocks in report.landed.items() if report is not None else ():
            self.prefills.landed(request_id, blocks)
        for request_id in sorted(results.received | results.lost):
            self._transferred(request_id, received=request_id not in results.lost)

    def cached_tokens(self, request_id: str) -> int | None:
        """Prompt tokens that were in the prefix cache before the request's remote prefill; None
        without one."""
        prefill = self.prefills.by_request.get(request_id)
        return None if prefill is None or not prefill.tries else prefill.cached_tokens

    def request_finished(self, request_id: str) -> None:
        """The request has ended, with its KV or without."""
        prefill = self.prefills.finished(request_id)
        if prefill is None:
            return
        if prefill.wait is not None:
            self._flights.finished(prefill.wait)
        if prefill.attempt and prefill.outcome is None:
            attempt = prefill.attempt
            self._events.append(lambda ledger: ledger.finished(attempt))

    @property
    def busy(self) -> bool:
        """Whether the engine must make steps even without requests."""
        return bool(self._message.give_up or self._events or self.prefills.unsettled)

    def _decided(
        self,
        request: Prompt,
        cached: int,
        transferable: bool,
        known: RemotePrefill | None,
        offloaded: int,
    ) -> Decided:
        """known: the prompt's record so far. If the prompt has had a remote prefill before, the
        time limit of that one applies. The request's own deadline always applies."""
        at, options = self._now(), self._net.options
        timeout_s = options.remote_prefill_timeout_s
        if known is not None and known.until is not None:
            timeout_s = known.until - at
        inputs = DecisionInputs(
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=cached,
            offloaded_tokens=offloaded,
            queue=self._queue(at),
            time_left_s=min(timeout_s, decode_params_of(request).time_left_s(at)),
            transferable=transferable and request.prompt_token_ids is not None,
            leaving=self._net.leaving,
            prefix_awaited=known is not None and known.wait is not None and known.wait.served,
        )
        return Decided(decide(inputs, options), at, inputs, options)

    def _queue(self, now: float) -> QueueSeen | None:
        """The last reading plus what this engine has asked for since; no less than what it waits
        for."""
        view, workers = self._net.queue_watch.view, self._net.workers
        if view is None:
            return None
        jobs, tokens = self.prefills.asked_since(view.read_at)
        return QueueSeen(
            jobs=max(view.jobs + jobs, self.prefills.jobs),
            tokens=max(view.tokens + tokens, self.prefills.tokens),
            prefill_workers=len(workers.usable),
            age_s=max(now - view.read_at, 0.0),
            prefill_workers_alive=len(workers.responsive),
        )

    def _begin(
        self, prefill: RemotePrefill, request: Prompt, tables: BlockTables, external: int
    ) -> tuple[RemotePrefillRequest, float]:
        """Begins an attempt that brings the KV of `external` tokens. Returns its job, and until
        when the request waits, in monotonic seconds."""
        size, wanted = self._block_size, request.num_prompt_tokens - 1
        computed = (wanted - external) // size
        first = self._first_awaited(tables, computed)
        end = -(-wanted // size)
        now, options = self._now(), prefill.decided.options
        attempt, params = self._new_attempt(), decode_params_of(request)
        # The writer may read the prefix while it writes the rest. As long as it can touch them, the
        # blocks stay reserved, whatever becomes of the request.
        pool = self._pool.blocks
        held = [pool[block] for table in tables for block in table[:end] if not pool[block].is_null]
        self._pool.touch(held)
        until = self.prefills.asked(
            prefill,
            request,
            attempt,
            now,
            timeout_s=min(options.remote_prefill_timeout_s, params.time_left_s(now)),
            first_block=first,
            awaited_tokens=external,
            # A window keeps the end of a prompt only, which serves no other prompt.
            serves_others=first == computed,
            held=held,
        )
        job = RemotePrefillRequest(
            engine_id=self._engine_id,
            request_id=request.request_id,
            attempt=attempt,
            prompt_token_ids=(request.prompt_token_ids or [])[:wanted],
            num_computed_tokens=first * size,
            block_ids=list(tables[0][first:end]),
            # A window's prefix is not whole, so no writer may read it.
            prefix_block_ids=list(tables[0][:first]) if len(tables) == 1 else [],
            other_groups=[list(table[first:end]) for table in tables[1:]],
            deadline=self._clock.wall() + until - now,
            priority=request.priority,
            cache_salt=request.cache_salt,
            adapter=params.adapter,
            trace_headers=None if prefill.trace is None else prefill.trace.headers(),
            first_token=_first_token(request, params, wanted - external),
        )
        return job, until

    def _first_awaited(self, tables: BlockTables, computed: int) -> int:
        """The number of the first block that must be written, after `computed` cached ones.

        Where layers attend to a sliding window only, null blocks stand for the tokens before the
        window. Nothing is written there.
        """
        blocks = self._pool.blocks
        return min(
            next(n for n in range(computed, len(table)) if not blocks[table[n]].is_null)
            for table in tables
        )

    def _vouched(self, job: RemotePrefillRequest) -> RemotePrefillRequest:
        """Removes the prefix from the job unless every prefix block is complete and stays so.

        The prefix cache contains blocks from the moment when their computation is scheduled, and a
        prompt may hit them in the same step. A prefill worker may read them before that has ended.
        """
        for block in job.prefix_block_ids:
            if self._pool.blocks[block].is_null or any(block in step for step in self._filling):
                return structs.replace(job, prefix_block_ids=[])
        return job

    def _take_inbox(self) -> None:
        """Carries out what the bridge has left for this step."""
        inbox = self._attempts.inbox
        while inbox:
            match inbox.popleft():
                case Release(attempt):
                    self._pool.free_blocks(reversed(self.prefills.release(attempt)))
                case Ended(request_id, attempt, outcome, detail):
                    if self.prefills.ended(attempt, outcome, detail) is not None:
                        self._message.give_up.append((attempt, request_id))
                        logger.info(
                            "request %s: attempt %s ended: %s", request_id, attempt, outcome.value
                        )
                case Claimed(attempt, claim, writer, at):
                    self._message.claims[attempt] = claim
                    self.prefills.claimed(attempt, writer, at)

    def _transferred(self, request_id: str, *, received: bool) -> None:
        if (found := self.prefills.unparked(request_id)) is None:
            return
        prefill, prompt = found
        attempt = prefill.attempt
        outcome = Outcome.COMMITTED if received else Outcome.CORRUPT
        if self.prefills.ended(attempt, outcome) is not None:
            # All ranks have the commits of all writers, or said so of others: no write follows.
            self._events.append(lambda ledger: ledger.received(attempt))
        if not received:
            self._lost(prefill, prompt)

    def _lost(self, prefill: RemotePrefill, prompt: Prompt) -> None:
        """The remote prefill has ended without its KV, and the engine is about to take the blocks
        back. Those that a lost writer had finished are given to the prefix cache before, so that
        the engine finds them when it decides about the prompt again.

        They stay in quarantine as well, which is safe: a writer that writes a finished block again
        writes the same contents.
        """
        others = sum(member.lease_id != prefill.writer for member in self._net.workers.usable)
        reason = again(prefill, others=others, now=self._now())
        prefill.may_retry = reason == WRITER_LOST
        blocks = 0 if self._cache is None else prefill.landed_blocks or 0
        if blocks and self._cache is not None:
            self._cache(prompt, (prefill.first_block + blocks) * self._block_size)
        assert prefill.outcome is not None
        logger.info(
            "request %s: attempt %s: remote prefill lost (%s), %d blocks are kept; retry: %s",
            prefill.request_id,
            prefill.attempt,
            prefill.outcome.value,
            blocks,
            reason,
        )
        self.stats.add(f"{RESUME}/{reason}")


def _first_token(
    request: Prompt, params: DecodeRequestParams, cached: int
) -> FirstTokenWanted | None:
    """cached: prompt tokens in the prefix cache."""
    prompt = request.prompt_token_ids
    if not prompt or not params.first_token:
        return None
    return FirstTokenWanted(last_token_id=prompt[-1], cached_tokens=cached)
