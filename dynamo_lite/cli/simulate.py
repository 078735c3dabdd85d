"""`dynamo-lite sim`: runs seeds of the simulation and prints the results."""

import sys
import time

from dynamo_lite.cli.exits import EXIT_FAILED, EXIT_INTERRUPTED
from dynamo_lite.cli.progress_line import ProgressLine
from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.simulation.draw import draw
from dynamo_lite.simulation.loop.trace import Trace
from dynamo_lite.simulation.mutants import MUTANTS
from dynamo_lite.simulation.play import play
from dynamo_lite.simulation.report import coverage_lines, verdict_line, violated_lines
from dynamo_lite.simulation.runner import Lost, play_many
from dynamo_lite.simulation.scenario import Scenario
from dynamo_lite.simulation.tally import Played, Tally


def check_options(
    *,
    seed: int | None,
    seeds: int | None,
    trace: bool,
    first: int | None,
    jobs: int | None,
    stop: bool,
    mutant: str | None,
) -> None:
    """Raises ConfigError."""
    mistakes: list[str] = []
    if (seed is None) == (seeds is None):
        mistakes.append("give either --seed N (run seed N) or --seeds N (run N seeds)")
    for name, given in (("--first", first), ("--jobs", jobs), ("--stop", stop or None)):
        if given is not None and seeds is None:
            mistakes.append(f"{name} requires --seeds")
    if trace and seed is None:
        mistakes.append("--trace requires --seed")
    if mutant is not None and mutant not in MUTANTS:
        mistakes.append(f"--mutant: {mutant!r} is unknown; accepted: {', '.join(MUTANTS)}")
    if mistakes:
        raise ConfigError(mistakes)


def play_one(seed: int, *, mutant: str | None = None, show_trace: bool = False) -> int:
    """Returns the exit code."""
    for line in _scenario_lines(draw(seed)):
        print(line)
    trace = Trace(on=show_trace)
    played = play(seed, shipped=MUTANTS[mutant].parts() if mutant else None, trace=trace)
    for line in trace.text():
        print(line)
    tally = Tally()
    tally.add(played)
    for line in coverage_lines(tally):
        print(line)
    for violation in played.violations:
        print(f"violated at {violation}")
    print(f"seed {seed}: {'violated' if played.violations else 'no invariant violated'}")
    return EXIT_FAILED if played.violations else 0


def play_range(
    seeds: range, *, jobs: int | None = None, mutant: str | None = None, stop: bool = False
) -> int:
    """Returns the exit code. stop: end at the first violated seed."""
    tally, progress = Tally(), _Progress(len(seeds))
    outcomes = play_many(seeds, jobs=jobs, mutant=mutant)
    interrupted = False
    try:
        for outcome in outcomes:
            bad = _count(tally, outcome)
            if bad is not None:
                progress.clear()
                print("\n".join(violated_lines(outcome.seed, bad, mutant)), flush=True)
            progress.show(tally)
            if stop and bad is not None:
                break
    except KeyboardInterrupt:
        interrupted = True
    finally:
        outcomes.close()
        progress.clear()
    for line in coverage_lines(tally):
        print(line)
    print(verdict_line(tally))
    print(progress.rate(tally), file=sys.stderr)
    if interrupted:
        print(f"interrupted before seed {seeds.start + _ended(tally)}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_FAILED if tally.bad else 0


def _count(tally: Tally, outcome: Played | Lost) -> str | None:
    """Adds an outcome to the tally. Returns its first violation or error; None without."""
    if isinstance(outcome, Lost):
        tally.lose(outcome.seed, outcome.why)
        return outcome.why
    tally.add(outcome)
    return outcome.violations[0] if outcome.violations else None


def _ended(tally: Tally) -> int:
    return tally.seeds + len(tally.lost)


def _scenario_lines(scenario: Scenario) -> list[str]:
    lines = [
        f"seed {scenario.seed}: {scenario.profile}, {scenario.clients} clients,"
        f" {scenario.decode} decode and {scenario.prefill} prefill workers,"
        f" {scenario.num_blocks} blocks each, {len(scenario.asks)} requests",
        f"  lease {scenario.lease_ttl_s:g} s,"
        f" remote prefill at most {scenario.remote_prefill_timeout_s:.3f} s,"
        f" redelivery after {scenario.ack_wait_s:.3f} s, {scenario.max_jobs} jobs at most,"
        f" writes up to {scenario.slowest_write_s:g} s, {scenario.token_s:g} s a token",
    ]
    skews = [f"{host} {ahead_s:+.1f} s" for host, ahead_s in scenario.clock_skews]
    lines += [f"  wall clocks: {', '.join(skews)}"] if skews else []
    lines += scenario.planner.lines() if scenario.planner is not None else []
    return lines + [f"  {fault.at_s:10.6f}  {fault}" for fault in scenario.faults]


class _Progress:
    """Seeds done, speed, remaining time."""

    def __init__(self, wanted: int):
        self.wanted = wanted
        self._began = time.monotonic()
        self._line = ProgressLine()

    def show(self, tally: Tally) -> None:
        self._line.show(lambda: self._text(tally))

    def clear(self) -> None:
        """Erases the line, so that other lines can be printed."""
        self._line.clear()

    def _text(self, tally: Tally) -> str:
        ended, took_s = _ended(tally), max(time.monotonic() - self._began, 1e-9)
        left_s = (self.wanted - ended) * took_s / max(ended, 1)
        return (
            f"{ended:,} of {self.wanted:,} seeds, {len(tally.bad)} violated,"
            f" {ended / took_s:.1f} seeds/s, about {_duration(left_s)} left"
        )

    def rate(self, tally: Tally) -> str:
        took_s = max(time.monotonic() - self._began, 1e-9)
        return f"{tally.seeds:,} seeds in {_duration(took_s)}: {tally.seeds / took_s:.1f} seeds/s"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {whole % 60:02} s"
