"""The decision between local and remote prefill by learned costs, beside the one by thresholds.

What must be local stays local. Else the side that costs less is taken, if the difference is larger
than its uncertainty and the predictions have been good; in all other cases the thresholds decide.
"""

from typing import Literal, NamedTuple

from dynamo_lite.policy.decision.disagg import (
    DecisionReason,
    Local,
    QueueView,
    Remote,
    Verdict,
    fresh,
    too_late,
)
from dynamo_lite.policy.decision.exploration import Exploration, coin
from dynamo_lite.policy.decision.prefill_costs import Costs, EngineState, PrefillCosts
from dynamo_lite.protocol.options import CostPolicyOptions, DecisionThresholds

Side = Literal["local", "remote"]

#: A trial may cost this share of the target of the first token.
_TRIAL_SHARE = 0.1
#: Standard deviations by which both sides must stay below that target, and the share of the target
#: between tokens that a step without prompts may take.
_TRIAL_SIGMAS, _TRIAL_ITL_SHARE = 2.0, 0.8


class Opinion(NamedTuple):
    """What the costs say about a prompt."""

    #: None: they do not decide, and `why` says why.
    side: Side | None
    #: A `DecisionReason` that makes it local, a reason of `PrefillCosts.unsure_of`, or `close`;
    #: empty: the costs differ enough.
    why: str
    #: None: not known.
    costs: Costs | None = None

    @property
    def reliable(self) -> bool:
        """Whether the costs are known well enough to measure regret by them."""
        return self.why in ("", "close")

    @property
    def word(self) -> str:
        """For counting."""
        return self.why or str(self.side)


class CostPolicy:
    """Of one engine. now: monotonic seconds."""

    def __init__(self) -> None:
        self.costs = PrefillCosts()
        self.exploration = Exploration()

    def opinion(
        self,
        uncached: int,
        cached: int,
        here: EngineState,
        queue: QueueView | None,
        thresholds: DecisionThresholds,
        now: float,
        time_left_s: float,
    ) -> Opinion:
        """uncached, cached: the prompt's tokens. here: the engine's state. Others: see
        `disagg.decide`."""
        queue = fresh(queue, thresholds, now)
        if queue is None:
            return Opinion("local", DecisionReason.QUEUE_UNKNOWN.value)
        if queue.prefill_workers == 0:
            return Opinion("local", DecisionReason.NO_PREFILL_WORKER.value)
        if too_late(queue, time_left_s):
            return Opinion("local", DecisionReason.TOO_LATE.value)
        if uncached <= 1:  # the last token is always computed here
            return Opinion("local", DecisionReason.SHORT.value)
        costs = self.costs.of(uncached, cached, here, queue, now)
        if why := self.costs.unsure_of(now):
            return Opinion(None, why, costs)
        gain_s = costs.here_s - costs.elsewhere_s
        if abs(gain_s) <= costs.band_s:
            return Opinion(None, "close", costs)
        return Opinion("remote" if gain_s > 0 else "local", "", costs)

    def choose(
        self,
        by_thresholds: Verdict,
        opinion: Opinion,
        request_id: str,
        here: EngineState,
        options: CostPolicyOptions,
        now: float,
    ) -> tuple[Verdict, float]:
        """The verdict, and the probability with which it is this side.

        Where the engine acts on a verdict with the reason `explored`, call `exploration.take`.
        """
        costs = opinion.costs
        if costs is None or (opinion.side is None and opinion.why != "close"):
            return by_thresholds, 1.0
        usual = by_thresholds if opinion.side is None else _verdict(opinion.side, costs)
        if not self._may_try(costs, here, options):
            return usual, 1.0
        share = self.exploration.propensity(now)
        if coin(request_id) >= share:
            return usual, 1.0 - share
        remote = isinstance(usual, Remote)
        return (Local if remote else Remote)(DecisionReason.EXPLORED), share

    def _may_try(self, costs: Costs, here: EngineState, options: CostPolicyOptions) -> bool:
        gain_s, target_s = abs(costs.here_s - costs.elsewhere_s), options.ttft_target_s
        latest_s = max(costs.local_s, costs.remote_s) + _TRIAL_SIGMAS * costs.band_s
        decode_s = self.costs.steps.decode_s(here.load)
        return (
            gain_s <= min(costs.band_s, _TRIAL_SHARE * target_s)
            and latest_s <= target_s
            and decode_s <= _TRIAL_ITL_SHARE * options.itl_target_s
        )


def side_of(verdict: Verdict) -> Side:
    return "remote" if isinstance(verdict, Remote) else "local"


def _verdict(side: Side, costs: Costs) -> Verdict:
    if side == "remote":
        return Remote(DecisionReason.CHEAPER)
    free_s = costs.elsewhere_s - costs.wait_s - costs.queue_s
    crowded = costs.here_s - free_s > costs.band_s
    return Local(DecisionReason.CROWDED if crowded else DecisionReason.CHEAPER)


def regret_s(costs: Costs, taken: Side, cost_s: float) -> float:
    """By how much the other side, as predicted, would have cost less. cost_s: of the side that was
    taken."""
    other_s = costs.here_s if taken == "remote" else costs.elsewhere_s
    return max(0.0, cost_s - other_s)
