"""What a decision between local and remote prefill costs: by thresholds, and with learned costs.

    python -m benchmarks.decision

Processor time of one decision, and of what is learned in one engine step, in a loop over random
prompts. Target: the costs add less than 50 us to a decision.
"""

import random
import statistics
import time
from collections.abc import Callable

from benchmarks.command import parser_of, write_json
from dynamo_lite.policy.decision.cost_policy import CostPolicy
from dynamo_lite.policy.decision.disagg import DecisionReason, QueueView, Remote, decide
from dynamo_lite.policy.decision.prefill_costs import EngineState
from dynamo_lite.policy.decision.step_time import PromptWork, StepLoad, work_of
from dynamo_lite.protocol.options import CostPolicyOptions, DecisionThresholds

TARGET_US = 50.0
_PROMPTS, _ROUNDS = 2000, 15
_LIMITS, _OPTIONS = DecisionThresholds(), CostPolicyOptions(prefill_policy="cost")
_REMOTE = Remote(DecisionReason.LONG)


class Bench:
    """A policy that is sure of its predictions, and prompts to decide about."""

    def __init__(self) -> None:
        rng = random.Random(0)
        self.policy, self.now = CostPolicy(), 100.0
        self.loads: list[StepLoad] = []
        for number in range(_PROMPTS):
            streams = rng.randrange(1, 100)
            work = work_of(rng.randrange(100, 8000), 0) if number % 3 == 0 else PromptWork()
            self.loads.append(StepLoad(work.tokens, work.attention, streams, streams * 1000))
        self.learn()
        self.prompts = [
            (rng.randrange(2, 16_000), QueueView(rng.randrange(20), 4, self.now, 9000, 0.3, 0.4))
            for _ in range(_PROMPTS)
        ]
        self.heres = [EngineState(one, PromptWork(), 8192, 500_000, 0.5) for one in self.loads]
        for (tokens, queue), here in zip(self.prompts[:300], self.heres, strict=False):
            costs = self.policy.costs.of(tokens, 0, here, queue, self.now)
            took_s = 0.31 + tokens * rng.uniform(2e-5, 3e-5)
            self.policy.costs.add_remote(costs, tokens, took_s, self.now)
        opinions = [self.policy.opinion(*self._asked(i)) for i in range(_PROMPTS)]
        self.sure = sum(one.reliable for one in opinions) / _PROMPTS

    def _asked(self, i: int):
        tokens, queue = self.prompts[i]
        return tokens, 0, self.heres[i], queue, _LIMITS, self.now, 30.0

    def learn(self) -> None:
        for load in self.loads:
            took_s = 0.01 + 2e-5 * load.prefill_tokens + 1e-7 * load.kv_tokens
            self.policy.costs.steps.add(load, took_s, self.now)

    def by_thresholds(self) -> None:
        for tokens, queue in self.prompts:
            decide(
                prompt_tokens=tokens,
                cached_tokens=0,
                queue=queue,
                thresholds=_LIMITS,
                now=self.now,
                time_left_s=30.0,
            )

    def by_costs(self) -> None:
        choose, opinion = self.policy.choose, self.policy.opinion
        for i in range(_PROMPTS):
            choose(_REMOTE, opinion(*self._asked(i)), "cmpl-1", self.heres[i], _OPTIONS, self.now)


def each_us(call: Callable[[], None]) -> float:
    """Processor time of one of the prompts that `call` takes, the median of some rounds."""
    times: list[float] = []
    for _ in range(_ROUNDS):
        began = time.process_time()
        call()
        times.append((time.process_time() - began) / _PROMPTS * 1e6)
    return statistics.median(times)


def main() -> None:
    parser = parser_of("decision", __doc__)
    given = parser.parse_args()
    bench = Bench()
    rows = {
        "thresholds_us": each_us(bench.by_thresholds),
        "costs_us": each_us(bench.by_costs),
        "step_us": each_us(bench.learn),
        "sure": bench.sure,
    }
    met = "met" if rows["costs_us"] < TARGET_US else "missed"
    print(f"a decision by thresholds {rows['thresholds_us']:.1f} us")
    print(f"the costs beside it      {rows['costs_us']:.1f} us; target {TARGET_US:.0f} us: {met}")
    print(f"learning from a step     {rows['step_us']:.1f} us, solutions included")
    print(f"predictions relied on    {rows['sure']:.0%}")
    write_json(given.json, rows)


if __name__ == "__main__":
    main()
