"""The process of a simulated engine: its steps, and their outputs to its component.

A step computes digests over real blocks and takes virtual time. The component
is another process: it posts commands and receives outputs, and neither waits
for the other.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo_lite.engine.base import EngineLoad
from dynamo_lite.protocol.generate import PrefillCounts, TokenDelta
from dynamo_lite.runtime.clock import Clock
from tests.simulation.engine.halves import DecodeHalves, PrefillHalves, merge
from tests.simulation.engine.memory import SimKvMemory
from tests.simulation.engine.plan import StepPlan
from tests.simulation.engine.pool import BlockPool
from tests.simulation.engine.request import SimRequest, SimRequestStatus
from tests.simulation.engine.scheduler import SimScheduler

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SimModelConfig:
    """Size and speed of a simulated engine; times in (virtual) seconds.

    budget_tokens: computed in one step at most. A step takes step_s and token_s for
    each token; one that has nothing to compute takes poll_s. load_s: the start.
    """

    model: str = "sim"
    block_size: int = 4
    num_blocks: int = 96
    max_model_len: int = 192
    budget_tokens: int = 48
    max_running: int = 8
    step_s: float = 0.004
    token_s: float = 0.0005
    poll_s: float = 0.02
    load_s: float = 0.2
    #: Whether an idle engine reports its load once more.
    tells_load: bool = False


@dataclass
class Outputs:
    """The outputs of one step, from the engine to its component."""

    deltas: list[TokenDelta] = field(default_factory=list[TokenDelta])
    counts: dict[str, Any] = field(default_factory=dict[str, Any])
    load: EngineLoad = field(default_factory=EngineLoad)


class SimCore:
    """halves: None for an engine without remote prefill. deliver: takes the outputs."""

    def __init__(
        self,
        config: SimModelConfig,
        pool: BlockPool,
        memory: SimKvMemory,
        halves: DecodeHalves | PrefillHalves | None,
        *,
        clock: Clock,
        deliver: Callable[[Outputs], None],
    ):
        self.config, self.pool, self.memory, self.halves = config, pool, memory, halves
        self.scheduler = SimScheduler(
            pool,
            config.block_size,
            halves,
            budget_tokens=config.budget_tokens,
            max_running=config.max_running,
        )
        self.steps = 0
        self._gave_tokens = False
        #: The load that was reported last.
        self._told = EngineLoad()
        #: Called after each step with the time at which it was scheduled.
        self.on_step: Callable[[float], None] = lambda scheduled_at: None
        #: Called with the ids of requests that are about to be aborted.
        self.on_abort: Callable[[Sequence[str]], None] = lambda request_ids: None
        self._clock, self._deliver = clock, deliver
        self._added: list[SimRequest] = []
        self._aborted: list[str] = []
        self._posted = asyncio.Event()
        self._stopping = False

    @property
    def is_wanted(self) -> bool:
        """Whether it has a request that was not aborted. An abort is carried out after the step
        that is being computed."""
        requests = {*self.scheduler.requests, *(added.request_id for added in self._added)}
        return not requests.issubset(self._aborted)

    # Commands of the component

    def add(self, request: SimRequest) -> None:
        self._added.append(request)
        self._posted.set()

    def abort(self, request_ids: Sequence[str]) -> None:
        self._aborted += request_ids
        self._posted.set()

    def stop(self) -> None:
        """`run` ends after the step that is being computed."""
        self._stopping = True
        self._posted.set()

    # The engine's own process

    async def run(self) -> None:
        while not self._stopping:
            self._apply_commands()
            if self.scheduler.has_work:
                await self._step()
            else:
                self._tell_load()
                self._posted.clear()
                await self._posted.wait()

    def _apply_commands(self) -> None:
        added, self._added = self._added, []
        for request in added:
            self.scheduler.add(request)
        aborted, self._aborted = self._aborted, []
        if aborted:
            self.on_abort(aborted)
            self.scheduler.abort(aborted)

    async def _step(self) -> None:
        config = self.config
        scheduled_at = self._clock.monotonic()
        plan = self.scheduler.schedule(scheduled_at)
        if self.halves is not None:
            self.halves.before_forward(plan.step)
        tokens = plan.tokens
        await asyncio.sleep(config.step_s + tokens * config.token_s if tokens else config.poll_s)
        outputs = self._forward(plan)
        self.steps += 1
        if self.halves is not None:
            results, report = self.halves.after_forward(plan.step)
            self._end_generated(plan)
            self.scheduler.apply_results(results, report)
            outputs.counts = merge(self.halves.take_counts())
        else:
            self._end_generated(plan)
        self.on_step(scheduled_at)
        self._gave_tokens = self._gave_tokens or bool(outputs.deltas)
        if outputs.deltas or outputs.counts:
            outputs.load = self._told = self._load()
            self._deliver(outputs)

    def _load(self) -> EngineLoad:
        return EngineLoad(
            running=self.scheduler.running,
            waiting=self.scheduler.waiting,
            kv_usage=1 - self.pool.get_num_free_blocks() / max(1, self.pool.num_gpu_blocks - 1),
            gave_tokens=self._gave_tokens,
            max_running=self.config.max_running,
        )

    def _tell_load(self) -> None:
        """As vLLM does after the last request was aborted."""
        if self.config.tells_load and (load := self._load()) != self._told:
            self._told = load
            self._deliver(Outputs(load=load))

    def _forward(self, plan: StepPlan) -> Outputs:
        """First the KV of all requests: prompts of one step may share blocks. Then the tokens."""
        computed = [
            (self.scheduler.requests[request_id], count)
            for request_id, count in plan.num_scheduled_tokens.items()
        ]
        for request, count in computed:
            end = request.num_computed_tokens
            self.memory.fill(request.block_ids, end - count, request.states[end - count : end])
        outputs = Outputs()
        for request, _ in computed:
            if request.num_computed_tokens == request.num_tokens:
                outputs.deltas.append(self._sample(request))
        return outputs

    def _sample(self, request: SimRequest) -> TokenDelta:
        first = not request.output_token_ids
        kv = self.memory.read(request.block_ids, request.num_tokens)
        request.take(token := request.sampler.draw(kv))
        counts = PrefillCounts(
            request.num_prompt_tokens,
            request.cached_tokens,
            request.external_tokens,
            request.waited_s,
            self._clock.monotonic() - request.arrived,
        )
        return TokenDelta(
            request_id=request.request_id,
            token_ids=[token],
            finish_reason=request.finish_reason,
            prefill=counts if first else None,
        )

    def _end_generated(self, plan: StepPlan) -> None:
        for request_id in plan.num_scheduled_tokens:
            request = self.scheduler.requests.get(request_id)
            if request is None or request.status is not SimRequestStatus.RUNNING:
                continue
            if request.finish_reason is not None:
                self.scheduler.finish(request)
