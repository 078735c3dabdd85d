"""What a decode engine measures of its steps and prompts, for the next decisions."""

from collections.abc import Mapping

from dynamo_lite.disagg.counters import Counters
from dynamo_lite.disagg.decode.cost_learning import CostLearning
from dynamo_lite.disagg.decode.live_thresholds import LiveThresholds
from dynamo_lite.disagg.decode.prefill_rate import PrefillRate
from dynamo_lite.disagg.decode.remote_prefills import RemotePrefills
from dynamo_lite.disagg.engine_api import BlockPool
from dynamo_lite.policy.decision.step_time import StepLoad


class Measurements:
    """Runs on the engine's thread. See `CostLearning` for the numbers."""

    def __init__(
        self,
        prefills: RemotePrefills,
        stats: Counters,
        pool: BlockPool,
        live: LiveThresholds,
        *,
        overlapping_steps: int,
        budget: int,
        block_size: int,
    ):
        self._live = live
        self.costs = CostLearning(
            prefills,
            stats,
            pool,
            overlapping_steps=overlapping_steps,
            budget=budget,
            block_size=block_size,
        )
        self.rate = PrefillRate(prefills, overlapping_steps, self.costs)
        prefills.on_decided.add(self.costs.decided)
        prefills.on_resumed.add(self.rate.add_remote)

    @property
    def learns(self) -> bool:
        """Whether the costs of steps are learned."""
        return self._live.now.options.prefill_policy != "thresholds"

    def step(self, load: StepLoad | None, scheduled: Mapping[str, int], now: float) -> None:
        """A step is scheduled. load: None while nothing is to be learned. scheduled: how many
        tokens the step computes, by request."""
        self.costs.step(load, scheduled, now)  # before `rate` counts down the left tokens
        self.rate.step(scheduled, now)
