"""The planner on a simulated graph: attainment, GPU-seconds, reversals and convergence.

    python -m benchmarks.planner --seeds 20 --json planner.json
    python -m benchmarks.planner --loads sine --option down-window-s=300
    python -m benchmarks.planner --sensitivity --references 0

Each load is played by the planner with every seed, and by the oracle and static graphs with the
first --references of them. The oracle of a row is the cheapest of several shares that reaches 95 %,
the static graph the cheapest that reaches what the planner has reached. With --sensitivity the
loads are played with other start times, and with engines that are faster and slower.
"""

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import msgspec

from benchmarks.capacity.fleet import WorkerCounts
from benchmarks.capacity.graph import Slo
from benchmarks.capacity.load import SHAPES, Shape
from benchmarks.capacity.oracle import Oracle
from benchmarks.capacity.run import Run, Setting
from benchmarks.capacity.scaler import PlannerScaler
from benchmarks.capacity.timing import GPU_LIKE
from benchmarks.command import parser_of, write_json
from dynamo_lite.planner.policy.limits import contradictions
from dynamo_lite.protocol.options import DisaggOptions, PlannerOptions

#: The targets: attainment, and ticks after a start.
LEAST, MOST_TICKS = 0.95, 3
#: No change of a role in the other direction within so many seconds; numbers that stay the same by
#: one for so many seconds have converged.
REVERSAL_S, STEADY_S = 600.0, 300.0
#: Of prefill and decode workers; the oracle with the best ones counts.
ORACLES = ((0.7, 1.0), (0.8, 1.0), (0.9, 1.0), (1.0, 1.0), (1.1, 1.0))
SLO = Slo(ttft_s=2.0, itl_s=0.05)
#: Requests per second at the start, and tokens.
RATE, PROMPT_TOKENS, OUTPUT_TOKENS = 2.0, 12_000, 500
MOST_WORKERS = 24

#: Who chooses the numbers of workers: nobody, the oracle with these shares, or the planner.
Who = WorkerCounts | tuple[float, float] | None


@dataclass(frozen=True)
class Case:
    """One load with one seed."""

    load: str
    seed: int
    duration_s: float = 3600.0
    start_s: float = 60.0
    #: Times of steps in those of the timing.
    scale: float = 1.0
    #: Options of the planner that are not the default ones.
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def setting(self) -> Setting:
        shape = Shape(
            kind=self.load,
            duration_s=self.duration_s,
            rate=RATE,
            peak=4 * RATE,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=OUTPUT_TOKENS,
        )
        return Setting(
            requests=shape.requests(self.seed),
            timing=replace(GPU_LIKE, step=GPU_LIKE.step.scaled(self.scale)),
            thresholds=DisaggOptions(max_prefill_queue_size=16),
            most_workers=MOST_WORKERS,
            start_s=self.start_s,
            seed=self.seed,
        )

    def limits(self) -> PlannerOptions:
        """Raises ValueError for wrong options."""
        most = dict.fromkeys(("budget_devices", "prefill_max", "decode_max"), MOST_WORKERS)
        options: dict[str, Any] = {**most, "start_s": self.start_s, **self.options}
        if unknown := options.keys() - PlannerOptions.__dataclass_fields__.keys():
            raise ValueError(f"{', '.join(sorted(unknown))}: no option of the planner")
        limits = msgspec.convert(options, PlannerOptions, strict=False)
        if mistakes := contradictions(limits):
            raise ValueError("; ".join(mistakes))
        return limits


@dataclass(frozen=True)
class Played:
    """One run."""

    name: str
    attained: float
    gpu_s: float
    reversals: int
    #: From the step of the load; None: the load has none, or the numbers never stay.
    converged_s: float | None
    #: Most workers of both roles.
    most: int


def play(case: Case, who: Who) -> Played:
    """The planner and the oracle begin with the numbers that the first seconds need."""
    setting = case.setting()
    counts, scaler, name = Oracle(setting, SLO).at_start(), None, "planner"
    if isinstance(who, WorkerCounts):
        counts, name = who, str(who)
    elif who is None:
        scaler = PlannerScaler(case.limits())
    else:
        scaler, name = Oracle(setting, SLO, who), f"oracle {who[0]:g}+{who[1]:g}"
        counts = scaler.at_start()
    result = Run(setting, counts, scaler).run()
    timelines = [
        timeline((at, getattr(wanted, role)) for at, wanted in result.changes)
        for role in ("prefill", "decode")
    ]
    converged = None
    if case.load == "step" and len(result.changes) > 1:
        converged = convergence(timelines, case.duration_s / 3, case.start_s)
    return Played(
        name,
        result.graph.records.attained(SLO),
        result.graph.device_seconds(),
        sum(map(reversals, timelines)),
        converged,
        sum(max(number for _, number in line) for line in timelines),
    )


def timeline(changes: Iterable[tuple[float, int]]) -> list[tuple[float, int]]:
    """Times and numbers, each other than the one before."""
    kept: list[tuple[float, int]] = []
    for at, number in changes:
        if not kept or kept[-1][1] != number:
            kept.append((at, number))
    return kept


def reversals(changes: Sequence[tuple[float, int]]) -> int:
    """Changes of one role in the other direction than the one before, soon after it."""
    steps = [(at, number > before) for (_, before), (at, number) in pairwise(changes)]
    return sum(up != was and at - then < REVERSAL_S for (then, was), (at, up) in pairwise(steps))


def convergence(
    timelines: Sequence[Sequence[tuple[float, int]]], step_s: float, start_s: float
) -> float | None:
    """Seconds from the step until the numbers of ready workers stay within one of each other."""
    ready = [
        sorted(
            (at + (start_s if index and number > line[index - 1][1] else 0.0), number)
            for index, (at, number) in enumerate(line)
        )
        for line in timelines
    ]
    times = sorted({at for line in ready for at, _ in line if at > step_s})
    for at in times:
        spans = [
            [_at(line, at)] + [n for then, n in line if at < then <= at + STEADY_S]
            for line in ready
        ]
        if all(max(span) - min(span) <= 1 for span in spans):
            return at - step_s
    return None


def _at(line: Sequence[tuple[float, int]], at: float) -> int:
    return [number for then, number in line if then <= at][-1]


class Bench:
    """Plays what a row needs."""

    def __init__(self, pool: ProcessPoolExecutor):
        self._pool = pool

    def rows(self, case: Case, seeds: int, references: int) -> list[dict[str, Any]]:
        """Of the seeds from 0 on."""
        cases = [replace(case, seed=seed) for seed in range(seeds)]
        played = self._pool.map(partial(play, who=None), cases)
        return [
            self._row(one, planner, compare=one.seed < references)
            for one, planner in zip(cases, played, strict=True)
        ]

    def _row(self, case: Case, planner: Played, *, compare: bool) -> dict[str, Any]:
        row: dict[str, Any] = {"case": case, "planner": planner}
        if compare:
            oracles = self._played(case, ORACLES)
            enough = [one for one in oracles if one.attained >= LEAST]
            row["oracle"] = min(enough, key=lambda one: one.gpu_s, default=None)
            row["static"] = self._static(case, planner)
        return row

    def _played(self, case: Case, who: Sequence[Who]) -> list[Played]:
        return list(self._pool.map(partial(play, case), who))

    def _static(self, case: Case, planner: Played) -> Played | None:
        """The cheapest that reaches at least what the planner has."""
        total = max(planner.most - 2, 2)
        best = self._enough(case, total, planner.attained)
        while best is not None and total > 2:
            total -= 1
            better = self._enough(case, total, planner.attained)
            if better is None:
                return best
            best = better
        while best is None and total < 20:
            total += 1
            best = self._enough(case, total, planner.attained)
        return best

    def _enough(self, case: Case, total: int, least: float) -> Played | None:
        """Of the graphs with so many workers, about a quarter to a half of them for prefill."""
        shares = range(max((total + 1) // 4, 1), max(total // 2, 1) + 1)
        graphs = [WorkerCounts(prefill, total - prefill) for prefill in shares]
        good = [one for one in self._played(case, graphs) if one.attained >= least]
        return min(good, key=lambda one: one.gpu_s, default=None)


def described(name: str, rows: Sequence[dict[str, Any]], case: Case) -> str:
    """A line of the table."""
    planner = [row["planner"] for row in rows]
    took = [one.converged_s for one in planner if one.converged_s is not None]
    within = case.start_s + MOST_TICKS * case.limits().tick_s
    statics = sorted({row["static"].name for row in rows if row.get("static")})
    return "  ".join(
        (
            f"{name:18}",
            f"{_range([100 * one.attained for one in planner], '.1f'):>20}",
            f"{_range([one.gpu_s for one in planner], ',.0f'):>24}",
            f"{_range(_ratios(rows, 'oracle'), '.2f'):>16}",
            f"{_range(_ratios(rows, 'static'), '.2f'):>16}",
            f"{_range([one.reversals for one in planner], '.0f'):>9}",
            f"{_range(took, '.0f') + (f' of {within:.0f}' if took else ''):>18}",
            ", ".join(statics),
        )
    ).rstrip()


def _ratios(rows: Sequence[dict[str, Any]], other: str) -> list[float]:
    """GPU-seconds of the planner in those of another one, where that was played."""
    return [row["planner"].gpu_s / row[other].gpu_s for row in rows if row.get(other) is not None]


HEAD = "  ".join(
    (
        f"{'':18}",
        f"{'attained %':>20}",
        f"{'GPU-s':>24}",
        f"{'/ oracle':>16}",
        f"{'/ static':>16}",
        f"{'reversals':>9}",
        f"{'converged after s':>18}",
        "best static",
    )
)


def _range(values: Sequence[float], form: str) -> str:
    """Median, and the range of several."""
    if not values:
        return "-"
    middle, least, most = (format(one, form) for one in (median(values), min(values), max(values)))
    return middle if least == most else f"{middle} ({least}-{most})"


def cases(given: argparse.Namespace, options: Mapping[str, Any]) -> list[tuple[str, Case]]:
    base = Case("", 0, start_s=given.start_s, duration_s=given.duration, options=options)
    base.limits()
    loads = [replace(base, load=load) for load in given.loads.split(",")]
    if unknown := {one.load for one in loads} - set(SHAPES):
        raise ValueError(f"{', '.join(sorted(unknown))}: no load; accepted: {', '.join(SHAPES)}")
    if not given.sensitivity:
        return [(one.load, one) for one in loads]
    changed: list[tuple[str, Case]] = []
    for one in loads:
        changed += [
            (f"{one.load} start {s:g} s", replace(one, start_s=s)) for s in (5, 20, 120, 300)
        ]
        changed += [(f"{one.load} x {x:g}", replace(one, scale=x)) for x in (0.7, 1.3)]
    return changed


def _option(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    return key.replace("-", "_"), value


def main() -> None:
    parser = parser_of("planner", __doc__)
    parser.add_argument("--loads", default=",".join(SHAPES), help="of these, with commas between")
    parser.add_argument(
        "--option",
        type=_option,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the planner; more than once for several",
    )
    parser.add_argument("--seeds", type=int, default=3, help="of each load (default 3)")
    parser.add_argument("--references", type=int, default=20, help="seeds with oracle and static")
    parser.add_argument(
        "--start-s", type=float, default=60.0, help="start of a worker (default 60)"
    )
    parser.add_argument("--duration", type=float, default=3600.0, help="seconds of each load")
    parser.add_argument("--sensitivity", action="store_true", help="see above")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="processes (default: cores)"
    )
    given = parser.parse_args()
    try:
        chosen = cases(given, dict(given.option))
    except ValueError as exc:
        parser.error(str(exc))
    figures: dict[str, Any] = {}
    print(HEAD, flush=True)
    with ProcessPoolExecutor(given.jobs) as pool:
        bench = Bench(pool)
        for name, case in chosen:
            rows = bench.rows(case, given.seeds, given.references)
            print(described(name, rows, case), flush=True)
            figures[name] = [_values(row) for row in rows]
    write_json(given.json, figures)


def _values(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: asdict(value) for key, value in row.items() if value is not None}


if __name__ == "__main__":
    main()
