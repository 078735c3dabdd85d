"""The scheduler half of a decode engine.

The engine calls it for every new prompt, with the exact prefix-cache hit. It decides
local or remote, hands the job over once blocks are allocated, and lets the engine continue
when the KV has arrived or has been given up. All methods run on the engine's thread and never
block.
"""

import logging
import secrets
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence

from dynamo_lite.disagg.bridge import OpenBridge
from dynamo_lite.disagg.counters import REMOTE, Counters
from dynamo_lite.disagg.decode.control_session import ControlSession
from dynamo_lite.disagg.decode.cost_learning import CostLearning
from dynamo_lite.disagg.decode.decider import Decider
from dynamo_lite.disagg.decode.decision_log import DecisionLog
from dynamo_lite.disagg.decode.job_maker import JobMaker
from dynamo_lite.disagg.decode.live_thresholds import LiveThresholds
from dynamo_lite.disagg.decode.passing import Passing
from dynamo_lite.disagg.decode.prefill_rate import PrefillRate
from dynamo_lite.disagg.decode.remote_prefills import RemotePrefills
from dynamo_lite.disagg.decode.resume import CacheBlocks, Resumes
from dynamo_lite.disagg.decode.shared_state import LockedLedger
from dynamo_lite.disagg.decode.single_flight import SingleFlight
from dynamo_lite.disagg.decode.steal_back import StealBack
from dynamo_lite.disagg.engine_api import Block, BlockPool, Prompt
from dynamo_lite.disagg.engine_config import DecodeEngineConfig, EngineConfig
from dynamo_lite.disagg.messages import DecodeStep, RankResults, WorkerReport
from dynamo_lite.disagg.server_clients import ServerClients
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
from dynamo_lite.policy.step_time import StepLoad
from dynamo_lite.protocol.prefill import EngineStatus
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.runtime.clock import SYSTEM_CLOCK, Clock

logger = logging.getLogger(__name__)


class DecodeScheduler:
    """block_size: in tokens. cache: see `Resumes`. kept_free: blocks that a new prompt must leave
    free. new_attempt, new_grant: return new ids. hash_block_size: see `SingleFlight`.
    overlapping_steps: how many steps the engine may have in flight. step_tokens: most tokens of
    a step."""

    def __init__(
        self,
        config: EngineConfig,
        block_size: int,
        pool: BlockPool,
        *,
        outside: ServerClients,
        open_bridge: OpenBridge,
        clock: Clock = SYSTEM_CLOCK,
        ledger: Ledger | None = None,
        new_attempt: Callable[[], str] = lambda: uuid.uuid4().hex,
        new_grant: Callable[[], int] = lambda: secrets.randbits(63) or 1,
        cache: CacheBlocks | None = None,
        kept_free: int = 0,
        hash_block_size: int | None = None,
        overlapping_steps: int = 1,
        step_tokens: int = 2048,
    ):
        assert isinstance(config.role, DecodeEngineConfig)
        self._block_size, self._pool, self._clock = block_size, pool, clock
        now = clock.monotonic
        self._book = LockedLedger(ledger or Ledger(writer_grace_s=config.lease_ttl_s))
        self.stats = stats = Counters()
        self.prefills = prefills = RemotePrefills(stats, DecisionLog(config, now), now)
        tuning, news = LiveThresholds(config.role, block_size), threading.Event()
        self._net = ControlSession(
            config,
            self._book,
            prefills,
            self._status,
            tuning,
            outside=outside,
            new_grant=new_grant,
            clock=clock,
            on_drop=stats.drop,
            on_news=news.set,
        )
        self._tuning = tuning
        self._costs = CostLearning(
            prefills,
            stats,
            pool,
            overlapping_steps=overlapping_steps,
            budget=step_tokens,
            block_size=block_size,
        )
        self._rate = PrefillRate(prefills, overlapping_steps, self._costs)
        self._steals = StealBack(
            news, self._book, prefills, self._net.backlog, tuning, self._rate, stats
        )
        self._decider = Decider(self._net, tuning, prefills, self._rate, self._costs, now)
        self._flights = SingleFlight(hash_block_size, prefills, stats, now)
        self._resumes = Resumes(block_size, stats, lambda: len(self._net.workers.usable), cache)
        self._jobs = JobMaker(
            config.engine_id,
            block_size,
            pool,
            self._book,
            prefills,
            self._flights,
            self._net.backlog,
            clock,
            new_attempt,
            overlapping_steps,
        )
        self._passing = passing = Passing(kept_free)
        prefills.on_decided.add(lambda prefill, _: passing.allocated(prefill.request_id))
        prefills.on_decided.add(self._costs.decided)
        prefills.on_resumed.add(self._rate.add_remote)
        self.bridge = open_bridge(self._net.session)
        #: Set before the bridge starts, when all ranks are open.
        self.metadata: EngineMetadata | None = None
        self._step = DecodeStep()
        self._stepped_at = now()

    def num_new_matched_tokens(
        self, request: Prompt, cached: int, *, transferable: bool = True
    ) -> tuple[int | None, bool]:
        """How many tokens beyond `cached` a prefill worker will compute, and whether the
        request waits for them.

        Never the last prompt token: the engine computes it in order to sample. None: the
        engine must call again, because the request waits for the KV of another request, or
        lets requests pass that find enough free blocks.
        transferable: whether the prompt's KV depends on its tokens and cache salt only.
        """
        prefill = self.prefills.by_request.get(request.request_id)
        if prefill is not None and prefill.allocated and not prefill.may_retry:
            self.prefills.looked_up(prefill, cached)
            return 0, False
        # vLLM ignores None for a request that must not read the prefix cache.
        if transferable and self._passing.skips(
            request.request_id, self._pool.get_num_free_blocks()
        ):
            return None, False
        if prefill is not None and self._flights.waits(prefill, cached):
            return None, False
        decided = self._decider.decide(request, cached, transferable, prefill)
        prefill = self.prefills.proposed(request, decided)
        if self._flights.joins(request, prefill):
            return None, False
        if transferable:
            blocks = -(-request.num_prompt_tokens // self._block_size)
            self._passing.answered(request.request_id, blocks)
        if not prefill.is_remote:
            return 0, False
        return request.num_prompt_tokens - 1 - cached, True

    def state_after_alloc(self, request: Prompt, block_ids: Sequence[int], external: int) -> None:
        """The engine has reserved the prompt's blocks. Requests the KV of `external` tokens."""
        prefill = self.prefills.allocated(request)
        if prefill is not None and external:
            self._jobs.begin(prefill, request, block_ids, external)

    def build_step(
        self,
        filling: Iterable[int] = (),
        scheduled: Mapping[str, int] | None = None,
        load: StepLoad | None = None,
    ) -> DecodeStep:
        """Called in every step. Also applies the ledger's deadlines.

        filling: blocks that this step completes; the prefix cache has them already.
        scheduled: how many tokens the step computes, by request. load: their sums; None
        where `learns` is false.
        """
        self._stepped_at = now = self._clock.monotonic()
        self._passing.end_step(self._pool.get_num_free_blocks())
        self.prefills.stepped()
        self._costs.step(load, scheduled or {}, now)
        self._rate.step(scheduled or {}, now)
        self._apply(self._steals.step(scheduled or {}, now), fresh=True)
        for job in self._jobs.take(filling):
            self._step.expect[job.attempt] = job.request_id
            self._step.blocks[job.attempt] = tuple(job.block_ids)
            self.bridge.submit(self._net.push(job))
        with self._book.lock:
            due = self._book.ledger.tick(now)
            left = self._book.take_for_engine()
            self._step.grants = self._book.take_grants()
            # Also when blocks are released: what has arrived for them is taken before their reuse.
            releases = any(isinstance(one, Release) for one in (*left, *due))
            self._step.poll = releases or self._book.awaits_writes or bool(self._net.listening)
        self._apply(left)
        self._apply(due, fresh=True)
        step, self._step = self._step, DecodeStep()
        return step

    def worker_output(self, results: RankResults, report: WorkerReport | None = None) -> None:
        """The worker halves report which requests have received their KV or lost it."""
        for request_id, blocks in report.landed.items() if report is not None else ():
            self.prefills.landed(request_id, blocks)
        for request_id in sorted(results.received | results.lost):
            received = request_id in results.received
            prefill = self.prefills.unparked(request_id, received=received)
            with self._book.lock:
                instructions = self._book.ledger.received(
                    request_id, intact=request_id not in results.lost
                )
            self._apply(instructions, fresh=True)
            if prefill is not None and not received:
                now = self._clock.monotonic()
                if not self._resumes.lost(prefill, now):
                    self.prefills.falls_back(prefill)
                    self._costs.computes_here(now)

    def request_finished(self, request_id: str) -> None:
        """The request has ended, with its KV or without."""
        self._passing.finished(request_id)
        if (prefill := self.prefills.finished(request_id)) is not None:
            self._flights.finished(prefill)
            self._rate.finished(prefill, self._clock.monotonic())
        with self._book.lock:
            instructions = self._book.ledger.request_finished(request_id)
        self._apply(instructions, fresh=True)

    @property
    def learns(self) -> bool:
        """Whether the costs of steps are learned."""
        return self._tuning.now.options.prefill_policy != "thresholds"

    @property
    def awaits_kv_s(self) -> float | None:
        """Seconds since the last remote prefill was requested; None if no request waits for KV."""
        with self._book.lock:
            if self._book.ledger.waiting == 0:
                return None
        return self._clock.monotonic() - self.prefills.last_asked_at

    @property
    def unfinished(self) -> str:
        """Why this engine cannot leave its role yet; empty if it can."""
        with self._book.lock:
            if left := self._book.unfinished:
                return left
        if self._net.listening:
            return "a link to it is being tested"
        return "it has requests, or blocks are held back" if self.prefills else ""

    @property
    def busy(self) -> bool:
        """Whether the engine must make steps even without requests."""
        waits = bool(self._step.give_up or self._net.listening)
        return waits or self._book.busy or self.prefills.busy

    def _apply(self, instructions: list[Instruction], *, fresh: bool = False) -> None:
        """Carries out instructions about blocks and requests. fresh: the instructions for the
        network have not been carried out yet."""
        for instruction in instructions:
            if isinstance(instruction, Hold):
                blocks: list[Block] = [self._pool.blocks[i] for i in instruction.block_ids]
                self._pool.touch(blocks)
                self.prefills.hold(instruction.attempt, blocks)
            elif isinstance(instruction, Release):
                self._pool.free_blocks(reversed(self.prefills.release(instruction.attempt)))
            elif isinstance(instruction, GiveUp):
                self._step.give_up.append((instruction.attempt, instruction.request_id))
            elif isinstance(instruction, Ended):
                self._ended(instruction)
        network = [i for i in instructions if isinstance(i, DeleteJob | CancelWriter)]
        if fresh and network:
            self.bridge.submit(self._net.events.carry_out(network))

    def _ended(self, ended: Ended) -> None:
        request_id, attempt, outcome = ended.request_id, ended.attempt, ended.outcome
        self.stats.add(f"{REMOTE}/{outcome.value}")
        self.prefills.ended(ended)
        self.bridge.submit(self._net.backlog.publish_soon())
        if outcome is not Outcome.COMMITTED:
            logger.info("request %s: attempt %s ended: %s", request_id, attempt, outcome.value)

    def _status(self) -> EngineStatus | None:
        """Runs on the bridge's thread, without the ledger's lock."""
        if self.metadata is None:
            return None
        ledger = self._book.ledger
        return EngineStatus(
            metadata=self.metadata,
            free_blocks=self._pool.get_num_free_blocks(),
            total_blocks=self._pool.num_gpu_blocks,
            waiting=ledger.waiting,
            quarantined=ledger.quarantined,
            queue_jobs=self._net.queue_jobs,
            last_step_age_s=self._clock.monotonic() - self._stepped_at,
            unresponsive_writers=self._net.workers.unresponsive,
            unusable_writers=self._net.workers.unusable,
            options_version=self._net.options_version,
            writers=sorted(ledger.writers),
        )
