"""The planner in the capacity simulator: attainment, GPU-seconds, reversals and convergence.

    python -m benchmarks.planner --seeds 20 --json planner.json --svg docs/benchmarks
    python -m benchmarks.planner --loads sine --planner planner:down-window-s=300
    python -m benchmarks.planner --sensitivity --references 0

Each load is played by the planner with every seed, and by the oracle and static graphs with the
first --references of them. The oracle of a row is the cheapest of several shares that reaches 95 %,
the static graph the cheapest that reaches what the planner has reached. With --sensitivity the
loads are played with other start times, and with engines that are faster and slower.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.command import parser_of, write_json
from dynamo_lite.capacity.compare import Setting, run_variant, variant
from dynamo_lite.capacity.options import GraphModelOptions, Slo, WorkerCounts
from dynamo_lite.capacity.picture import picture
from dynamo_lite.capacity.report import summary
from dynamo_lite.capacity.timing import read_timing
from dynamo_lite.capacity.traces import SHAPES, Shape, generate
from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.protocol.options import DecisionThresholds, PlannerOptions

#: The targets: attainment, GPU-seconds in those of the oracle, and ticks after a start.
LEAST, MOST_RATIO, MOST_TICKS = 0.95, 1.2, 3
#: No change of a role in the other direction within so many seconds; numbers that stay the same by
#: one for so many seconds have converged.
REVERSAL_S, STEADY_S = 600.0, 300.0
#: Of prefill and decode workers; the oracle with the best ones counts.
ORACLES = ("0.7+1.0", "0.8+1.0", "0.9+1.0", "1.0+1.0", "1.1+1.0")
SLO = Slo(ttft_s=2.0, itl_s=0.05)


@dataclass(frozen=True)
class Case:
    """One load with one seed."""

    load: str
    seed: int
    rate: float = 2.0
    duration_s: float = 3600.0
    prompt_tokens: int = 12_000
    output_tokens: int = 500
    start_s: float = 60.0
    #: Times of steps in those of the timing file.
    scale: float = 1.0
    timing: str = "gpu_like"

    def setting(self) -> Setting:
        """All runs begin with the numbers that the first seconds need."""
        timing = read_timing(self.timing)
        timing = msgspec.structs.replace(timing, step=timing.step.scaled(self.scale))
        shape = Shape(
            kind=self.load,
            duration_s=self.duration_s,
            rate=self.rate,
            peak=4 * self.rate,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
        )
        setting = Setting(
            requests=generate(shape, block_tokens=512, seed=self.seed).requests,
            timing=timing,
            options=GraphModelOptions(
                router="kv",
                thresholds=DecisionThresholds(max_prefill_queue_size=16),
                slo=SLO,
                seed=self.seed,
            ),
            counts=WorkerCounts(2, 2),
            most_workers=24,
            start_s=self.start_s,
        )
        return replace(setting, counts=variant("oracle", setting).counts)


@dataclass(frozen=True)
class Played:
    """One run."""

    name: str
    attained: float
    gpu_s: float
    reversals: int
    #: From the step of the load; None: the load has none, or the numbers never stay.
    converged_s: float | None
    summary: dict[str, Any]


def play(case: Case, name: str) -> Played:
    setting = case.setting()
    result = run_variant(variant(name, setting), setting)
    seen = summary(result, SLO)
    changes = [(one.at_s, one.wanted) for one in result.changes]
    timelines = [
        timeline(
            [(0.0, getattr(setting.counts, role))] + [(at, getattr(n, role)) for at, n in changes]
        )
        for role in ("prefill", "decode")
    ]
    converged = None
    if case.load == "step" and changes:
        converged = convergence(timelines, case.duration_s / 3, case.start_s)
    return Played(
        name,
        seen["attainment"]["both"],
        seen["gpu_s"]["total"],
        sum(map(reversals, timelines)),
        converged,
        seen,
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

    def __init__(self, pool: ProcessPoolExecutor, planner: str):
        self._pool, self._planner = pool, planner

    def rows(self, case: Case, seeds: int, references: int) -> list[dict[str, Any]]:
        """Of the seeds from 0 on."""
        cases = [replace(case, seed=seed) for seed in range(seeds)]
        played = self._pool.map(partial(play, name=self._planner), cases)
        return [
            self._row(one, planner, compare=one.seed < references)
            for one, planner in zip(cases, played, strict=True)
        ]

    def _row(self, case: Case, planner: Played, *, compare: bool) -> dict[str, Any]:
        row: dict[str, Any] = {"case": asdict(case), "planner": planner}
        if compare:
            oracles = self._played(case, [f"oracle:{shares}" for shares in ORACLES])
            enough = [one for one in oracles if one.attained >= LEAST]
            row["oracle"] = min(enough, key=lambda one: one.gpu_s, default=None)
            row["static"] = self._static(case, planner)
        return row

    def _played(self, case: Case, names: Sequence[str]) -> list[Played]:
        return list(self._pool.map(partial(play, case), names))

    def _static(self, case: Case, planner: Played) -> Played | None:
        """The cheapest that reaches at least what the planner has."""
        series = planner.summary["series"]
        total = max(max(series["prefill"]) + max(series["decode"]) - 2, 2)
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
        names = [f"static:{prefill}P{total - prefill}D" for prefill in shares]
        good = [one for one in self._played(case, names) if one.attained >= least]
        return min(good, key=lambda one: one.gpu_s, default=None)


def described(name: str, rows: Sequence[dict[str, Any]], start_s: float, tick_s: float) -> str:
    """A line of the table."""
    planner = [row["planner"] for row in rows]
    took = [one.converged_s for one in planner if one.converged_s is not None]
    within = start_s + MOST_TICKS * tick_s
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


def cases(given: argparse.Namespace) -> list[tuple[str, Case]]:
    base = Case("step", 0, start_s=given.start_s, duration_s=given.duration, timing=given.timing)
    loads = [replace(base, load=load) for load in given.loads.split(",")]
    if not given.sensitivity:
        return [(one.load, one) for one in loads]
    changed: list[tuple[str, Case]] = []
    for one in loads:
        changed += [
            (f"{one.load} start {s:g} s", replace(one, start_s=s)) for s in (5, 20, 120, 300)
        ]
        changed += [(f"{one.load} x {x:g}", replace(one, scale=x)) for x in (0.7, 1.3)]
    return changed


def main() -> None:
    parser = parser_of("planner", __doc__)
    parser.add_argument("--loads", default=",".join(SHAPES), help="of these, with commas between")
    parser.add_argument("--planner", default="planner", help="as in `simulate --compare`")
    parser.add_argument("--seeds", type=int, default=3, help="of each load (default 3)")
    parser.add_argument("--references", type=int, default=20, help="seeds with oracle and static")
    parser.add_argument(
        "--start-s", type=float, default=60.0, help="start of a worker (default 60)"
    )
    parser.add_argument("--duration", type=float, default=3600.0, help="seconds of each load")
    parser.add_argument("--timing", default="gpu_like", help="a timing file, or a shipped one")
    parser.add_argument("--sensitivity", action="store_true", help="see above")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="processes (default: cores)"
    )
    parser.add_argument("--svg", type=Path, help="draw the first seed of each load in this folder")
    given = parser.parse_args()
    tick_s = PlannerOptions().tick_s
    figures: dict[str, Any] = {}
    print(HEAD, flush=True)
    try:
        with ProcessPoolExecutor(given.jobs) as pool:
            bench = Bench(pool, given.planner)
            for name, case in cases(given):
                rows = bench.rows(case, given.seeds, given.references)
                print(described(name, rows, case.start_s, tick_s), flush=True)
                figures[name] = [_values(row) for row in rows]
                if given.svg:
                    _draw(given.svg / f"planner-{name.replace(' ', '-')}.svg", rows[0], name)
    except ConfigError as exc:
        sys.exit(f"error: {exc}")
    write_json(given.json, figures)


def _values(row: dict[str, Any]) -> dict[str, Any]:
    """A row without its curves."""
    values: dict[str, Any] = {"case": row["case"]}
    for who in ("planner", "oracle", "static"):
        if row.get(who) is not None:
            values[who] = {k: v for k, v in asdict(row[who]).items() if k != "summary"}
    return values


def _draw(file: Path, row: dict[str, Any], title: str) -> None:
    runs = [row[who].summary for who in ("planner", "oracle", "static") if row.get(who)]
    file.write_text(picture(runs, f"{title}: planner, oracle, best static graph"))


if __name__ == "__main__":
    main()
