"""Short and long prompts on one running graph, by thresholds and by learned costs, in pairs."""

import asyncio
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice

from benchmarks import intervals
from benchmarks.client import complete
from benchmarks.command import begin, parser_of, until_interrupted, write_json
from benchmarks.graph import RunningGraph, running_graph
from benchmarks.load import prompt_of
from dynamo_lite.capacity.compare import parse_counts
from dynamo_lite.capacity.options import GraphModelOptions
from dynamo_lite.capacity.regret import Play as SimulatedPlay
from dynamo_lite.capacity.request import TraceRequest
from dynamo_lite.capacity.timing import read_timing
from dynamo_lite.protocol.options import PrefillPolicy

#: Tokens of prompts, from and to.
SHORT, LONG = (64, 256), (600, 3000)
_TOKENS = 32
#: Requests per second, as in a Poisson process, and the prompts that come at once half-way.
_SHORT_PER_S, _LONG_PER_S, _BURST = 3.0, 0.5, 6
#: Most plays before the first pair, in which the engine learns what prompts cost.
_LEARNING = 20
#: Share of a play's decisions whose costs can be relied on, from which the costs count as known.
_LEARNED = 0.9
#: In how many plays one after the other they have to be known before the first pair.
_IN_A_ROW = 3
#: Plays on each side of a simulated pair, one after the other: those that teach the costs and do
#: not count, and those that do. And the seconds between them.
_TEACHING_PLAYS, _SIMULATED_PLAYS, _PAUSE_S = 4, 8, 5.0

#: Side -> `prefill-policy`. In the shadow the thresholds decide, and the engine goes on learning.
SIDES = {"thresholds": "shadow", "cost": "cost"}
#: The same in simulation, where nothing is learned for another play.
_POLICIES: dict[str, PrefillPolicy] = {"thresholds": "thresholds", "cost": "cost"}
_DECISIONS, _OPINIONS, _COST, _REGRET = (
    "dynamo_lite_prefill_decisions_total",
    "dynamo_lite_prefill_opinions_total",
    "dynamo_lite_prefill_cost_seconds_total",
    "dynamo_lite_prefill_regret_seconds_total",
)
#: What the costs say where they can be relied on.
_RELIABLE = ("local", "remote", "close")

_ABOUT = f"""\
One decode worker and one prefill worker with the tiny model. A play has, per second,
{_SHORT_PER_S:g} prompts of {SHORT[0]} to {SHORT[1]} tokens and {_LONG_PER_S:g} of
{LONG[0]} to {LONG[1]}, and {_BURST} of the latter at once half-way. Each answer has {_TOKENS}
tokens. A pair is two plays on the same graph, one after the other, with the same arrivals, but
other tokens, so that no prefix cache has them:

  thresholds  prefill-policy: shadow, which decides by thresholds and goes on learning
  cost        prefill-policy: cost

Every second pair begins with the other one. Before the pairs the graph is played in the shadow
until the costs were known in {_IN_A_ROW} plays in a row. Prints the ratios cost / thresholds of the
mean times, and what was decided why. Of the pairs in which the costs were known: that ratio of the
realised cost of a decision, and the regret of each side as a share of its cost.

--simulated plays the same arrivals in `dynamo-lite simulate`'s engine model, where each engine has
a core of its own. Each side of a pair is {_SIMULATED_PLAYS} plays one after the other, after
{_TEACHING_PLAYS} that teach the costs and do not count.
"""


@dataclass(frozen=True)
class Arrival:
    """A request of a play. at_s: after its start."""

    at_s: float
    prompt_tokens: int

    @property
    def long(self) -> bool:
        return self.prompt_tokens >= LONG[0]


@dataclass
class Play:
    """Seconds to the first token of short and of long prompts, and to the end of all. decisions:
    `verdict/reason` to their number. cost_s, regret_s: sums of the decisions whose costs could be
    relied on; reliable: their number. All three are 0 in simulation."""

    short_s: list[float] = field(default_factory=list)
    long_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    decisions: dict[str, float] = field(default_factory=dict)
    cost_s: float = 0.0
    regret_s: float = 0.0
    reliable: float = 0.0

    @property
    def known(self) -> bool:
        return self.reliable >= _LEARNED * len(self.total_s)

    @property
    def first_s(self) -> list[float]:
        return self.short_s + self.long_s

    def add(self, arrival: Arrival, first_s: float, total_s: float) -> None:
        (self.long_s if arrival.long else self.short_s).append(first_s)
        self.total_s.append(total_s)


Pair = dict[str, Play]

ROWS: dict[str, Callable[[Play], list[float]]] = {
    "first token": lambda play: play.first_s,
    "first token, short": lambda play: play.short_s,
    "first token, long": lambda play: play.long_s,
    "end to end": lambda play: play.total_s,
}


def arrivals(seconds: float, seed: int) -> list[Arrival]:
    """In order of time."""
    rng = random.Random(seed)
    made = [Arrival(seconds / 2, rng.randint(*LONG)) for _ in range(_BURST)]
    for rate, lengths in ((_SHORT_PER_S, SHORT), (_LONG_PER_S, LONG)):
        at_s = 0.0
        while (at_s := at_s + rng.expovariate(rate)) < seconds:
            made.append(Arrival(at_s, rng.randint(*lengths)))
    return sorted(made, key=lambda arrival: arrival.at_s)


def main() -> None:
    parser = parser_of("mixed", _ABOUT)
    parser.add_argument("--pairs", type=int, default=8, help="of plays (default 8)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a play (default 20)")
    parser.add_argument(
        "--quick", action="store_true", help="two pairs of 10 s, after one play with known costs"
    )
    parser.add_argument("--simulated", action="store_true", help="no graph: see above")
    options = begin(parser)
    learned = _IN_A_ROW
    if options.quick:
        options.pairs, options.seconds, learned = 2, 10.0, 1
    pairs: list[Pair] = []
    if options.simulated:
        with until_interrupted():
            for seed in range(options.pairs):
                pairs.append(simulated(options.seconds, seed))
                _say(pairs, options.pairs)
    else:
        with running_graph("graphs.disagg:Frontend", "configs/disagg.yaml") as graph:
            with until_interrupted():
                asyncio.run(measure(graph, options.pairs, options.seconds, learned, pairs))
    report(pairs)
    found = [{side: asdict(play) for side, play in pair.items()} for pair in pairs]
    write_json(options.json, found)


def simulated(seconds: float, seed: int) -> Pair:
    """A pair of the same arrivals in simulation, without noise: the same seed, the same pair."""
    plays, each_s = _TEACHING_PLAYS + _SIMULATED_PLAYS, seconds + _PAUSE_S
    plan = [
        Arrival(number * each_s + one.at_s, one.prompt_tokens)
        for number in range(plays)
        for one in arrivals(seconds, seed * plays + number)
    ]
    first = sum(one.at_s < _TEACHING_PLAYS * each_s for one in plan)
    load = SimulatedPlay(
        requests=[TraceRequest(one.at_s, one.prompt_tokens, _TOKENS) for one in plan],
        timing=read_timing("tiny_cpu"),
        options=GraphModelOptions(),
        counts=parse_counts("1P1D"),
    )
    pair: Pair = {}
    for side, policy in _POLICIES.items():
        result = load.run(policy)
        records, play = result.records, Play()
        times = zip(plan, records.ttft_s, records.total_s, strict=True)
        for arrival, first_s, total_s in islice(times, first, None):
            play.add(arrival, first_s, total_s)
        taken = result.graph.tally.choices.taken
        sides = [side for name, side in taken.items() if int(name) >= first]
        play.decisions = dict(Counter(sides))
        pair[side] = play
    return pair


async def measure(
    graph: RunningGraph, count: int, seconds: float, learned: int, into: list[Pair]
) -> None:
    """Appends each pair when it is whole.

    learned: plays in a row in which the costs have to be known before.
    """
    await _learn(graph, seconds, learned)
    for number in range(count):
        pair: Pair = {}
        for side in SIDES if number % 2 == 0 else reversed(SIDES):
            await asyncio.to_thread(graph.set_options, "VllmWorker", prefill_policy=SIDES[side])
            pair[side] = await _play(graph, arrivals(seconds, number), random.Random())
        into.append(pair)
        _say(into, count)


async def _learn(graph: RunningGraph, seconds: float, learned: int) -> None:
    """Returns when the costs of most prompts are known. Exits if that takes too long."""
    await asyncio.to_thread(graph.set_options, "VllmWorker", prefill_policy="shadow")
    said: dict[str, float] = {}
    row = 0
    for number in range(_LEARNING):
        before = _counted(graph, _OPINIONS, "costs")
        await _play(graph, arrivals(seconds, -1 - number), random.Random())
        said = _since(before, _counted(graph, _OPINIONS, "costs"))
        known = _reliable(said) >= _LEARNED * sum(said.values()) > 0
        row = row + 1 if known else 0
        if row == learned:
            return
    sys.exit(f"the costs are not known after {_LEARNING} plays: {said}")


async def _play(graph: RunningGraph, plan: Sequence[Arrival], rng: random.Random) -> Play:
    play, loop = Play(), asyncio.get_running_loop()
    before = _counters(graph)
    began = loop.time()

    async def ask(arrival: Arrival, prompt: list[int]) -> None:
        await asyncio.sleep(began + arrival.at_s - loop.time())
        answer = await complete(graph.port, prompt, _TOKENS)
        play.add(arrival, answer.first_s, answer.total_s)

    async with asyncio.TaskGroup() as group:
        for arrival in plan:
            group.create_task(ask(arrival, prompt_of(arrival.prompt_tokens, rng)))
    decisions, opinions, cost, regret = map(_since, before, _counters(graph))
    play.decisions = {name: count for name, count in decisions.items() if count}
    play.reliable = _reliable(opinions)
    play.cost_s, play.regret_s = sum(cost.values()), sum(regret.values())
    return play


def _counters(graph: RunningGraph) -> list[dict[str, float]]:
    return [
        _counted(graph, _DECISIONS, "verdict", "reason"),
        _counted(graph, _OPINIONS, "costs"),
        _counted(graph, _COST, "verdict"),
        _counted(graph, _REGRET, "verdict"),
    ]


def _reliable(opinions: Mapping[str, float]) -> float:
    return sum(opinions.get(name, 0.0) for name in _RELIABLE)


def _since(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in now.items()}


def _counted(graph: RunningGraph, metric: str, *labels: str) -> dict[str, float]:
    """The decode worker's samples of a metric: the values of these labels, joined by `/`."""
    found: dict[str, float] = {}
    for name, value in graph.metrics("VllmWorker").items():
        kind, _, rest = name.partition("{")
        if kind == metric:
            values = dict(part.split("=", 1) for part in rest.rstrip("}").split(","))
            key = "/".join(values[label].strip('"') for label in labels)
            found[key] = found.get(key, 0.0) + value
    return found


def report(pairs: Sequence[Pair]) -> None:
    if not pairs:
        print("no pair was measured")
        return
    print(f"cost / thresholds, mean of {len(pairs)} pairs (95 % confidence interval)")
    for name, times in ROWS.items():
        means = [statistics.fmean(t for p in pairs for t in times(p[side])) for side in SIDES]
        _print_ratio(name, ratios(pairs, times), means)
    if known := [pair for pair in pairs if all(play.known for play in pair.values())]:
        print(f"of {len(known)} pairs with known costs")
        _report_costs(known)
    for side in SIDES:
        made: Counter[str] = Counter()
        for pair in pairs:
            made.update(pair[side].decisions)
        shown = ", ".join(f"{count:g} {name}" for name, count in made.most_common())
        print(f"{side:20} {shown}")


def _report_costs(pairs: Sequence[Pair]) -> None:
    plays = {side: [pair[side] for pair in pairs] for side in SIDES}
    costs = {side: [play.cost_s / play.reliable for play in plays[side]] for side in SIDES}
    each = [cost / other for cost, other in zip(costs["cost"], costs["thresholds"], strict=True)]
    _print_ratio("cost of a decision", each, [statistics.fmean(costs[side]) for side in SIDES])
    for side in SIDES:
        share = intervals.of_mean([play.regret_s / play.cost_s for play in plays[side]])
        spread = f"{share.mean:.1%} ({max(share.low, 0.0):.1%} to {share.high:.1%})"
        count = sum(play.reliable for play in plays[side])
        print(f"{'regret, ' + side:20} {spread} of the cost of {count:g} decisions")


def _print_ratio(name: str, each: Sequence[float], means_s: Sequence[float]) -> None:
    """each: cost / thresholds of each pair. means_s: of each side."""
    ratio = intervals.of_ratio(each)
    spread = f"{ratio.mean:.2f} x ({ratio.low:.2f} to {ratio.high:.2f})"
    by = ", ".join(f"{side} {1e3 * mean:.0f} ms" for side, mean in zip(SIDES, means_s, strict=True))
    print(f"{name:20} {spread:26} {by}")


def ratios(pairs: Sequence[Pair], times: Callable[[Play], list[float]]) -> list[float]:
    """Mean time by costs over that by thresholds, of each pair."""
    return [
        statistics.fmean(times(pair["cost"])) / statistics.fmean(times(pair["thresholds"]))
        for pair in pairs
    ]


def _say(pairs: Sequence[Pair], count: int) -> None:
    """The last pair."""
    told = ", ".join(f"{row} {ratios(pairs[-1:], times)[0]:.2f} x" for row, times in ROWS.items())
    print(f"pair {len(pairs)} of {count}: {told}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
