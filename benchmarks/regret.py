"""What the decisions between local and remote prefill cost, and what the best ones would have cost.

    python -m benchmarks.regret                 # six loads, thresholds and learned costs
    python -m benchmarks.regret --quick --json regret.json
    python -m benchmarks.regret --samples 0 --groups 8

It plays loads in `dynamo-lite simulate`'s engine model, with the shipped policies. The best
thresholds are found afterwards, by playing a grid. For a sample of the decisions the same load is
played again with that one reversed, and the times of the requests near it are compared.

With --groups the decisions of the costs are divided by their side, the prompt's length and whether
the prefill workers were busy. Each group is divided into so many parts at random, and the load is
played again with one part reversed. A group's regret is what its parts would have saved on average,
or 0; all of them together are the regret of the load. Intervals are of 95 % confidence.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks import intervals
from benchmarks.command import parser_of, until_interrupted, write_json
from dynamo_lite.capacity.compare import parse_counts
from dynamo_lite.capacity.group_regret import Group, GroupGains, group_gains
from dynamo_lite.capacity.options import GraphModelOptions
from dynamo_lite.capacity.regret import Play, waiting_s
from dynamo_lite.capacity.request import TraceRequest
from dynamo_lite.capacity.timing import Timing, read_timing
from dynamo_lite.capacity.traces import Shape, generate
from dynamo_lite.protocol.options import DecisionThresholds

#: Lengths and queue sizes of the grid. The last of each: never remote, no limit.
LENGTHS, QUEUES = (1, 512, 2000, 10**8), (4, 8, 32, 10**6)
#: Most waiting beyond that by the best thresholds, and beyond that by the default thresholds.
MOST, MOST_MORE = 0.10, 0.02


def load(kind: str, seconds: float, seed: int) -> list[TraceRequest]:
    """About what 2P4D can take at its peak with the timing `gpu_like`; mixed: many short prompts
    beside a burst of long ones."""

    def made(kind: str, rate: float, peak: float, prompt: int, output: int, seed: int):
        shape = Shape(
            kind=kind,
            duration_s=seconds,
            rate=rate,
            peak=peak,
            prompt_tokens=prompt,
            output_tokens=output,
        )
        return generate(shape, block_tokens=512, seed=seed).requests

    if kind == "mixed":
        short = made("constant", 24, 24, 300, 200, seed)
        long = made("burst", 2, 10, 8000, 300, seed + 1)
        return sorted(short + long, key=lambda request: request.arrival_s)
    rate, peak = {
        "constant": (14, 14),
        "step": (6, 18),
        "ramp": (4, 18),
        "burst": (6, 30),
        "sine": (4, 20),
    }[kind]
    return made(kind, rate, peak, 4000, 300, seed)


LOADS = ("constant", "step", "ramp", "burst", "sine", "mixed")


def best_thresholds(play: Play) -> tuple[str, float]:
    """The thresholds of the grid that cost least, and their cost."""
    found: list[tuple[float, str]] = []
    for length in LENGTHS:
        for jobs in QUEUES:
            thresholds = DecisionThresholds(
                max_local_prefill_length=length, max_prefill_queue_size=jobs
            )
            tried = replace(play, options=replace(play.options, thresholds=thresholds))
            cost_s = waiting_s(tried.run("thresholds"), play.timing)
            found.append((cost_s, f"length {length}, {jobs} jobs"))
    cost_s, name = min(found)
    return name, cost_s


def measured(play: Play, samples: int) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for policy in ("thresholds", "cost"):
        regret = play.regret(policy, samples)
        rows[policy] = {**asdict(regret), "share": regret.share}
    name, cost_s = best_thresholds(play)
    rows["best"] = {"thresholds": name, "cost_s": cost_s}
    choices = play.run("cost").graph.tally.choices
    rows["estimated_share"] = choices.regret_s / choices.cost_s if choices.cost_s else None
    rows["differs"] = sum(
        count for (side, word), count in choices.opinions.items() if word in _SIDES - {side}
    )
    rows["relied_on"] = sum(n for (_, word), n in choices.opinions.items() if word in _SIDES)
    return rows


_SIDES = {"local", "remote"}


def line(name: str, rows: dict[str, Any]) -> str:
    per = 1e3 / max(rows["cost"]["requests"], 1)
    by, cost, best = rows["thresholds"], rows["cost"], rows["best"]
    more = cost["cost_s"] / best["cost_s"] - 1
    met = more <= MOST and cost["cost_s"] <= by["cost_s"] * (1 + MOST_MORE)
    waits = f"{by['cost_s'] * per:7.1f} {cost['cost_s'] * per:7.1f} {best['cost_s'] * per:7.1f}"
    decided = f"{rows['relied_on']:6,} {rows['differs']:6,}  {_gains(by)}  {_gains(cost)}"
    verdict = "met" if met else "missed"
    return f"{name:9} {waits} {more:7.1%} {verdict:6}  {best['thresholds']:23} {decided}"


def _gains(row: dict[str, Any]) -> str:
    gain, error = row["gain_s"] * 1e3, row["gain_error_s"] * 1e3
    return f"{gain:7.0f} +-{error:4.0f} {row['share']:5.0%}"


def by_groups(found: Sequence[GroupGains], cost_s: float) -> dict[str, Any]:
    """The regret of each group and of all of them. cost_s: waiting of all requests.

    share: of the waiting. low, high: the sums of the groups' bounds, which is wider than 95 %
    confidence needs. A gain below 0 is no regret, and so is a bound below 0. unknown:
    decisions of groups that are too small to measure.
    """
    rows: list[dict[str, Any]] = []
    for one in found:
        if one.gains_s:
            gain = intervals.of_mean(one.gains_s)
            row = {"name": group_name(one.group), "decisions": one.decisions}
            rows.append({**row, **asdict(gain)})
    low, share, high = (
        sum(max(row[part], 0.0) * row["decisions"] for row in rows) / cost_s
        for part in ("low", "mean", "high")
    )
    return {
        "groups": rows,
        "share": share,
        "low": low,
        "high": high,
        "unknown": sum(one.decisions for one in found if not one.gains_s),
    }


def group_name(group: Group) -> str:
    tokens = "longer" if math.isinf(group.tokens) else f"up to {group.tokens:,} tokens"
    return f"{group.side}, {tokens}, {'busy' if group.crowded else 'free'}"


def print_groups(regret: dict[str, Any]) -> None:
    for row in regret["groups"]:
        mean, low, high = (1e3 * row[part] for part in ("mean", "low", "high"))
        gain = f"{mean:8.0f} ms ({low:.0f} to {high:.0f})"
        print(f"          {row['name']:34} {row['decisions']:6,} {gain}")
    share = f"{regret['share']:.1%} ({regret['low']:.1%} to {regret['high']:.1%}) of the waiting"
    print(f"          regret by groups: {share}; {regret['unknown']:,} decisions not measured")


def main() -> None:
    parser = parser_of("regret", __doc__)
    parser.add_argument("--workers", default="2P4D", help="prefill and decode (default 2P4D)")
    parser.add_argument("--timing", default="gpu_like", help="a timing file, or a shipped one")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each load (default 120)")
    parser.add_argument("--samples", type=int, default=60, help="decisions reversed per run")
    parser.add_argument("--groups", type=int, default=0, help="parts of each group (default: none)")
    parser.add_argument("--seed", type=int, default=0, help="of the loads (default 0)")
    parser.add_argument("--loads", default=",".join(LOADS), help="of these, with commas between")
    parser.add_argument("--quick", action="store_true", help="loads of 30 s, 5 samples")
    given = parser.parse_args()
    if given.groups == 1:
        parser.error("--groups: an interval needs at least 2 parts")
    timing: Timing = read_timing(given.timing)
    seconds, samples = (30.0, 5) if given.quick else (given.seconds, given.samples)
    print(
        "          waiting per request, ms: thresholds, costs, best thresholds; costs beyond best"
    )
    print("          best thresholds; decisions by costs, those unlike the thresholds'")
    print(
        "          thresholds, then costs: what a reversed decision gains, ms; its gains / waiting"
    )
    report: dict[str, Any] = {}
    began = time.monotonic()
    with until_interrupted():
        for kind in given.loads.split(","):
            play = Play(
                requests=load(kind, seconds, given.seed),
                timing=timing,
                options=GraphModelOptions(),
                counts=parse_counts(given.workers),
            )
            report[kind] = measured(play, samples)
            print(line(kind, report[kind]), flush=True)
            if given.groups:
                cost_s = report[kind]["cost"]["cost_s"]
                found = group_gains(play, "cost", given.groups, given.seed)
                report[kind]["by_groups"] = by_groups(found, cost_s)
                print_groups(report[kind]["by_groups"])
    print(f"{time.monotonic() - began:.0f} s")
    write_json(given.json, report)


if __name__ == "__main__":
    main()
