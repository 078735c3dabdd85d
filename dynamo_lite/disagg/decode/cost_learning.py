"""What this engine's steps and prompts cost, learned as they happen, and what the costs say about
the next prompt (`policy/decision/cost_policy.py`)."""

import math
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from dynamo_lite.disagg.counters import (
    COST,
    COST_ERROR,
    OPINION,
    PAUSE,
    PAUSING_TOKENS,
    REGRET,
    Counters,
)
from dynamo_lite.disagg.decode.remote_prefill import RemotePrefill
from dynamo_lite.disagg.decode.remote_prefills import RemotePrefills
from dynamo_lite.disagg.engine_api import BlockPool
from dynamo_lite.policy.decision.cost_policy import CostPolicy, Opinion, regret_s, side_of
from dynamo_lite.policy.decision.disagg import DecisionReason, QueueView, Verdict
from dynamo_lite.policy.decision.prefill_costs import EngineState
from dynamo_lite.policy.decision.step_time import PromptWork, StepLoad, work_of
from dynamo_lite.protocol.options import DisaggOptions


class _Step(NamedTuple):
    """A step whose end is awaited."""

    load: StepLoad
    scheduled: Mapping[str, int]
    #: The prompts that it computes here, with their tokens.
    prompts: list[tuple[RemotePrefill, int]]


class CostLearning:
    """Runs on the engine's thread; `now` is monotonic.

    overlapping_steps: how many steps may be in flight, including the one being scheduled.
    budget: most tokens of a step. block_size: in tokens.
    """

    def __init__(
        self,
        prefills: RemotePrefills,
        stats: Counters,
        pool: BlockPool,
        *,
        overlapping_steps: int,
        budget: int,
        block_size: int,
    ):
        self._prefills, self._stats, self._pool = prefills, stats, pool
        self._budget, self._block_size = budget, block_size
        self.policy = CostPolicy()
        self._load = StepLoad()
        self._steps: deque[_Step] = deque(maxlen=overlapping_steps)
        self._stepped_at = 0.0

    def decide(
        self,
        request_id: str,
        uncached: int,
        cached: int,
        usual: Verdict,
        queue: QueueView | None,
        options: DisaggOptions,
        now: float,
        time_left_s: float,
    ) -> tuple[Verdict, Opinion | None, float]:
        """Returns the verdict, what the costs say, and the probability with which the verdict
        takes this side.

        usual: the thresholds' verdict.
        """
        if options.prefill_policy == "thresholds":
            return usual, None, 1.0
        here = self._here()
        opinion = self.policy.opinion(uncached, cached, here, queue, options, now, time_left_s)
        if options.prefill_policy == "shadow":
            return usual, opinion, 1.0
        verdict, propensity = self.policy.choose(usual, opinion, request_id, here, options, now)
        return verdict, opinion, propensity

    def decided(self, prefill: RemotePrefill, now: float) -> None:
        """The decision is final."""
        decided = prefill.decided
        if decided.opinion is not None:
            side = side_of(decided.usual or decided.verdict)
            self._stats.add(f"{OPINION}/{side}/{decided.opinion.word}")
        if side_of(decided.verdict) == "local":
            self.computes_here(now)
        if decided.verdict.reason is DecisionReason.EXPLORED:
            self.policy.exploration.take(now)

    def computes_here(self, now: float) -> None:
        """A prompt is going to be computed here, also after a remote prefill that has failed."""
        self.policy.costs.computes_here(now)

    def step(self, load: StepLoad | None, scheduled: Mapping[str, int], now: float) -> None:
        """A step is scheduled, so the step before it has ended (with overlapping steps, an earlier
        one).

        load: None while nothing is to be learned. Call it before the prompts' left tokens are
        counted down. A step's time counts only if the engine was never idle: then this step has a
        request of the step before.
        """
        took_s, self._stepped_at = now - self._stepped_at, now
        if load is None:
            self._steps.clear()
            return
        steps, last = self._steps, self._steps[-1] if self._steps else None
        busy = last is not None and not last.scheduled.keys().isdisjoint(scheduled)
        if not busy:
            steps.clear()
        elif len(steps) == steps.maxlen and took_s > 0:
            self._learn(steps[0], took_s, now)
        prompts = [
            (prefill, count)
            for request_id, prefill in self._prefills.computing.items()
            if prefill.left_tokens > 0 and (count := scheduled.get(request_id, 0))
        ]
        steps.append(_Step(load, scheduled, prompts))
        self._load = load

    def local(self, prefill: RemotePrefill, took_s: float) -> None:
        """The prompt was computed here. After a remote prefill that failed or was taken back, this
        is not what was decided, and nothing is learned."""
        opinion = prefill.decided.opinion
        if opinion is None or opinion.costs is None or side_of(prefill.decided.verdict) != "local":
            return
        self.policy.costs.add_local(opinion.costs, took_s)
        costs = opinion.costs
        cost_s = took_s + prefill.pause_s + costs.behind_s
        self._realised(prefill, opinion, took_s, costs.local_s, cost_s)

    def remote(self, prefill: RemotePrefill, took_s: float, now: float) -> None:
        """The KV came, after `took_s`, and the step that samples is scheduled."""
        opinion = prefill.decided.opinion
        if opinion is None or (costs := opinion.costs) is None:
            return
        took_s += self.policy.costs.steps.decode_s(self._load)
        tokens = prefill.prompt_tokens - prefill.decided.cached_tokens
        self.policy.costs.add_remote(costs, tokens, took_s, now)
        cost_s = took_s + costs.queue_s + costs.memory_s
        self._realised(prefill, opinion, took_s, costs.remote_s, cost_s)

    def _learn(self, step: _Step, took_s: float, now: float) -> None:
        times, load = self.policy.costs.steps, step.load
        if load.prefill_tokens and load.streams and times.prefills:
            pause_s = times.pause_s(load, took_s)
            self._stats.add(PAUSE, pause_s)
            self._stats.add(PAUSING_TOKENS, load.prefill_tokens)
            for prefill, tokens in step.prompts:
                prefill.pause_s += pause_s * load.streams * tokens / load.prefill_tokens
        times.add(load, took_s, now)

    def _realised(
        self,
        prefill: RemotePrefill,
        opinion: Opinion,
        took_s: float,
        predicted_s: float,
        cost_s: float,
    ) -> None:
        side, costs = side_of(prefill.decided.verdict), opinion.costs
        prefill.cost_s = cost_s
        if costs is None or not opinion.reliable:
            return
        prefill.regret_s = regret_s(costs, side, cost_s)
        self._stats.add(f"{COST}/{side}", cost_s)
        self._stats.add(f"{REGRET}/{side}", prefill.regret_s)
        if took_s > 0 and predicted_s > 0:
            wrong = math.exp(abs(math.log(took_s / predicted_s)))
            self._stats.append(f"{COST_ERROR}/{side}", wrong)

    def _here(self) -> EngineState:
        ahead = PromptWork()
        for prefill in self._prefills.computing.values():
            if (left := prefill.left_tokens) > 0:
                ahead += work_of(left, prefill.prompt_tokens - left)
        blocks = self._pool.num_gpu_blocks
        usage = 1 - self._pool.get_num_free_blocks() / blocks
        return EngineState(self._load, ahead, self._budget, blocks * self._block_size, usage)
