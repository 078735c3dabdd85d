"""The scheduler half of a decode engine.

The engine asks it about every new prompt, with the exact prefix-cache hit; it decides
local or remote, turns the allocated blocks into a job, and lets the engine go
on when the KV has come or when nobody should wait for it any longer. All
methods run on the engine's thread and never wait.
"""

import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from dynamo_lite.engine.remote_prefill.book import LockedLedger
from dynamo_lite.engine.remote_prefill.bridge import OpenBridge
from dynamo_lite.engine.remote_prefill.counts import DECISION, REMOTE, Counts
from dynamo_lite.engine.remote_prefill.decode_link import DecodeLinkSession
from dynamo_lite.engine.remote_prefill.handover_clock import HandoverClock
from dynamo_lite.engine.remote_prefill.link import DecodeLink, EngineLink
from dynamo_lite.engine.remote_prefill.messages import DecodeStep, RankResults
from dynamo_lite.engine.remote_prefill.outside import Outside
from dynamo_lite.engine.remote_prefill.seams import Block, BlockPool, Prompt
from dynamo_lite.engine.remote_prefill.single_flight import SingleFlight
from dynamo_lite.policy import single_flight
from dynamo_lite.policy.disagg import (
    Local,
    QueueView,
    Reason,
    Remote,
    Thresholds,
    Verdict,
    decide,
)
from dynamo_lite.policy.instructions import (
    CancelWriter,
    DeleteJob,
    Ended,
    GiveUp,
    Hold,
    Instruction,
    Outcome,
    Release,
)
from dynamo_lite.policy.ledger import Ledger
from dynamo_lite.protocol.prefill import EngineStatus, RemotePrefillRequest
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.runtime.clock import SYSTEM_CLOCK, Clock


class DecodeScheduler:
    """block_size: in tokens. new_attempt: makes fresh attempt ids.

    hash_block_size: see `SingleFlight`.
    """

    def __init__(
        self,
        link: EngineLink,
        block_size: int,
        *,
        outside: Outside,
        open_bridge: OpenBridge,
        clock: Clock = SYSTEM_CLOCK,
        ledger: Ledger | None = None,
        new_attempt: Callable[[], str] = lambda: uuid.uuid4().hex,
        hash_block_size: int | None = None,
    ):
        assert isinstance(link.role, DecodeLink)
        self._link, self._role, self._block_size = link, link.role, block_size
        self._thresholds = Thresholds(
            max_local_prefill_length_tokens=link.role.max_local_prefill_length_tokens,
            max_prefill_queue_size=link.role.max_prefill_queue_size,
            queue_view_max_age_s=link.role.queue_view_max_age_s,
        )
        self._time, self._now, self._new_attempt = clock.wall, clock.monotonic, new_attempt
        self._book = LockedLedger(ledger or Ledger(writer_grace_s=link.lease_ttl_s))
        self.stats = Counts()
        self._clock = HandoverClock(self.stats, clock)
        self._flights = SingleFlight(
            single_flight.Thresholds(_shared_tokens(link.role, block_size)),
            hash_block_size,
            self.stats,
            self._now,
        )
        self._net = DecodeLinkSession(
            link,
            self._book,
            self._clock,
            self._status,
            outside=outside,
            now=self._now,
            on_drop=self.stats.drop,
        )
        self.bridge = open_bridge(self._net.session)
        self.metadata: EngineMetadata | None = None
        self._pool: BlockPool | None = None
        self._held: dict[str, list[Block]] = {}
        self._verdicts: dict[str, tuple[Verdict, float]] = {}
        self._decided: set[str] = set()
        self._asked_at: deque[float] = deque()
        self._step = DecodeStep()
        self._stepped_at = self._now()

    def bind_block_pool(self, pool: BlockPool) -> None:
        self._pool = pool

    def num_new_matched_tokens(
        self, request: Prompt, cached: int, *, transferable: bool = True
    ) -> tuple[int | None, bool]:
        """How many tokens beyond `cached` will come from a prefill worker.

        All but the last one: that one the engine computes, and samples from. None:
        ask again, the request waits for another one's KV.
        transferable: whether its KV is a function of its tokens and cache salt alone.
        """
        if request.request_id in self._decided:
            return 0, False
        if self._flights.waits(request.request_id, cached):
            return None, False
        decided = self._now()
        verdict = self._decide(request, cached, transferable)
        if self._flights.joins(request, cached, verdict):
            return None, False
        self._verdicts[request.request_id] = verdict, decided
        if isinstance(verdict, Local):
            return 0, False
        return request.num_prompt_tokens - 1 - cached, True

    def state_after_alloc(self, request: Prompt, block_ids: Sequence[int], external: int) -> None:
        """The engine reserved the prompt's blocks: ask for the KV of `external` tokens."""
        found = self._verdicts.pop(request.request_id, None)
        if found is None:
            self._clock.scheduled(request.request_id)
            return
        verdict, decided = found
        self._decided.add(request.request_id)
        self._flights.finished(request.request_id)
        kind = "remote" if isinstance(verdict, Remote) else "local"
        self.stats.add(f"{DECISION}/{kind}/{verdict.reason.value}")
        if external:
            self._ask(request, block_ids, external, decided)

    def build_step(self) -> DecodeStep:
        """Runs every step, and so does the ledger's housekeeping."""
        self._stepped_at = self._now()
        with self._book.lock:
            due = self._book.ledger.tick(self._now())
            left = self._book.take_for_engine()
            self._step.poll = bool(self._book.ledger.waiting or self._book.ledger.quarantined)
        self._apply(left)
        self._apply(due, fresh=True)
        step, self._step = self._step, DecodeStep()
        return step

    def worker_output(self, results: RankResults) -> None:
        """What the worker halves have received, well or not.

        What was given up before is not the ledger's any more.
        """
        for request_id in sorted(results.received | results.lost):
            self._flights.ended(request_id)
            with self._book.lock:
                instructions = self._book.ledger.received(
                    request_id, intact=request_id not in results.lost
                )
            self._apply(instructions, fresh=True)

    def request_finished(self, request_id: str) -> None:
        self._verdicts.pop(request_id, None)
        self._decided.discard(request_id)
        self._clock.forget(request_id)
        self._flights.finished(request_id)
        self._flights.ended(request_id)
        with self._book.lock:
            instructions = self._book.ledger.request_finished(request_id)
        self._apply(instructions, fresh=True)

    @property
    def busy(self) -> bool:
        return self._book.busy or bool(self._step.give_up)

    def _decide(self, request: Prompt, cached: int, transferable: bool) -> Verdict:
        if not transferable or request.prompt_token_ids is None:
            return Local(Reason.NOT_TRANSFERABLE)
        if self._net.leaving:
            return Local(Reason.LEAVING)
        verdict = decide(
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=cached,
            queue=self._queue_view(),
            thresholds=self._thresholds,
            now=self._now(),
        )
        if verdict.reason is Reason.CACHED and self._flights.served(request.request_id):
            return Local(Reason.SINGLE_FLIGHT)
        return verdict

    def _queue_view(self) -> QueueView | None:
        """The last reading, plus what this engine has asked for since."""
        view = self._net.view
        if view is None:
            return None
        while self._asked_at and self._asked_at[0] <= view.read_at:
            self._asked_at.popleft()
        return replace(view, jobs=view.jobs + len(self._asked_at))

    def _ask(
        self, request: Prompt, block_ids: Sequence[int], external: int, decided: float
    ) -> None:
        wanted = request.num_prompt_tokens - 1
        computed = wanted - external
        first = computed // self._block_size
        end = -(-wanted // self._block_size)
        targets = tuple(block_ids[first:end])
        timeout = self._role.remote_prefill_timeout_s
        assert request.prompt_token_ids is not None
        job = RemotePrefillRequest(
            engine_id=self._link.engine_id,
            request_id=request.request_id,
            attempt=self._new_attempt(),
            prompt_token_ids=request.prompt_token_ids[:wanted],
            num_computed_tokens=computed,
            block_ids=list(targets),
            deadline=self._time() + timeout,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )
        attempt, until = job.attempt, self._now() + timeout
        with self._book.lock:
            self._book.ledger.allocated(request.request_id, attempt, targets, until)
        self._step.expect[attempt] = request.request_id
        self._step.blocks[attempt] = targets
        self._clock.asked(attempt, decided)
        self._asked_at.append(self._now())
        self._flights.began(request, external)
        self.bridge.submit(self._net.push(job))

    def _apply(self, instructions: list[Instruction], *, fresh: bool = False) -> None:
        """The engine's part of the instructions; fresh ones also go to the network."""
        for instruction in instructions:
            if isinstance(instruction, Hold):
                self._hold(instruction)
            elif isinstance(instruction, Release):
                self._release(instruction)
            elif isinstance(instruction, GiveUp):
                self._step.give_up.append((instruction.attempt, instruction.request_id))
            elif isinstance(instruction, Ended):
                self.stats.add(f"{REMOTE}/{instruction.outcome.value}")
                committed = instruction.outcome is Outcome.COMMITTED
                self._clock.ended(instruction.attempt, instruction.request_id, committed=committed)
        network = [i for i in instructions if isinstance(i, DeleteJob | CancelWriter)]
        if fresh and network:
            self.bridge.submit(self._net.carry_out(network))

    def _hold(self, hold: Hold) -> None:
        assert self._pool is not None
        blocks = [self._pool.blocks[i] for i in hold.block_ids]
        self._pool.touch(blocks)
        self._held[hold.attempt] = blocks

    def _release(self, release: Release) -> None:
        assert self._pool is not None
        self._pool.free_blocks(reversed(self._held.pop(release.attempt)))

    def _status(self) -> EngineStatus | None:
        """Runs on the bridge's thread; reads of single numbers only."""
        if self.metadata is None or self._pool is None:
            return None
        view, ledger = self._net.view, self._book.ledger
        fresh = view is not None and (self._now() - view.read_at <= self._role.queue_view_max_age_s)
        return EngineStatus(
            metadata=self.metadata,
            free_blocks=self._pool.get_num_free_blocks(),
            total_blocks=self._pool.num_gpu_blocks,
            waiting=ledger.waiting,
            quarantined=ledger.quarantined,
            queue_jobs=view.jobs if fresh and view is not None else None,
            last_step_age_s=self._now() - self._stepped_at,
            unresponsive_writers=self._net.unresponsive_writers,
        )


def _shared_tokens(role: DecodeLink, block_size: int) -> int:
    """From how many on a wait pays: what is worth a remote prefill is worth a wait for one."""
    if role.single_flight_min_length_tokens is not None:
        return role.single_flight_min_length_tokens
    return role.max_local_prefill_length_tokens // block_size * block_size
