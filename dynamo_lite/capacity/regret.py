"""What a decision between local and remote prefill has cost all requests: the same load again, with
that one decision reversed and all others as they were."""

import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dynamo_lite.capacity.options import GraphModelOptions, WorkerCounts
from dynamo_lite.capacity.request import TraceRequest
from dynamo_lite.capacity.run import Result, Run
from dynamo_lite.capacity.scaling import Bounds, Static
from dynamo_lite.capacity.timing import Timing
from dynamo_lite.policy.decision.cost_policy import Side
from dynamo_lite.protocol.options import CostPolicyOptions, PrefillPolicy

#: Requests that arrived at most this long before or after a decision are compared. Later requests
#: also differ by chance, because any change of a run permanently changes the order of its jobs.
_BEFORE_S, _AFTER_S = 15.0, 5.0
#: How long a run continues after a reversed decision.
_PLAYED_S = 30.0


@dataclass(frozen=True, kw_only=True)
class RunRegret:
    """The regret of one run."""

    #: Seconds that all requests waited: their times without the steps that their tokens need
    #: anyway. It contains the wait for the first token and all pauses after it.
    cost_s: float
    requests: int
    #: Decisions with a choice, and how many of them were reversed.
    choices: int
    reversed: int
    #: Means over the reversed decisions: what the other side would have saved, counted as at least
    #: 0; the same with losses, and its standard error. The first mean is above 0 by chance alone.
    regret_s: float
    gain_s: float
    gain_error_s: float

    @property
    def share(self) -> float:
        """Regret of all decisions, as a share of the cost."""
        return self.regret_s * self.choices / self.cost_s if self.cost_s else 0.0


def waiting_s(result: Result, timing: Timing) -> float:
    """See `RunRegret.cost_s`."""
    times = [each for each in result.records.total_s if not math.isnan(each)]
    decoding_s = result.graph.tally.choices.decoding_s
    return math.fsum(times) - decoding_s - len(times) * timing.frontend_s


@dataclass(frozen=True, kw_only=True)
class Play:
    """One load on one graph."""

    requests: Sequence[TraceRequest]
    timing: Timing
    options: GraphModelOptions
    counts: WorkerCounts

    def run(self, policy: PrefillPolicy, forced: Mapping[str, Side] | None = None) -> Result:
        options = replace(self.options, costs=_with(self.options.costs, policy))
        bounds = Bounds(least=WorkerCounts(0, 1), most=self.counts.total)
        scaler = Static(self.counts)
        run = Run(self.requests, self.timing, options, scaler, self.counts, bounds, forced=forced)
        return run.run()

    def regret(self, policy: PrefillPolicy, samples: int, seed: int = 0) -> RunRegret:
        """samples: how many decisions are reversed, one in each run; drawn at random."""
        result = self.run(policy)
        taken = dict(result.graph.tally.choices.taken)
        cost_s = waiting_s(result, self.timing)
        drawn = random.Random(seed).sample(sorted(taken), min(samples, len(taken)))
        gains = [self._saved_s(result, int(name), reversed_for(taken, [name])) for name in drawn]
        counted = max(len(gains), 1)
        return RunRegret(
            cost_s=cost_s,
            requests=result.records.completed,
            choices=len(taken),
            reversed=len(gains),
            regret_s=math.fsum(max(gain, 0.0) for gain in gains) / counted,
            gain_s=math.fsum(gains) / counted,
            gain_error_s=_standard_error(gains),
        )

    def _saved_s(self, result: Result, number: int, forced: Mapping[str, Side]) -> float:
        """How much earlier the requests near this one end with these decisions."""
        at_s = self.requests[number].arrival_s
        near = [one for one in self.requests if one.arrival_s <= at_s + _PLAYED_S]
        again = replace(self, requests=near).run("thresholds", forced)
        then, now = result.records.total_s, again.records.total_s
        return math.fsum(
            then[i] - now[i]
            for i, one in enumerate(near)
            if at_s - _BEFORE_S <= one.arrival_s <= at_s + _AFTER_S
            and not math.isnan(then[i] - now[i])
        )


def reversed_for(taken: Mapping[str, Side], names: Iterable[str]) -> dict[str, Side]:
    """The sides taken, with the other one for these requests."""
    others: dict[str, Side] = {}
    for name in names:
        others[name] = "local" if taken[name] == "remote" else "remote"
    return {**taken, **others}


def _standard_error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.inf
    return statistics.stdev(values) / math.sqrt(len(values))


def _with(costs: CostPolicyOptions, policy: PrefillPolicy) -> CostPolicyOptions:
    return replace(costs, prefill_policy=policy)
