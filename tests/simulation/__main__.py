"""Simulates whole clusters with faults in virtual time, and checks the invariants.

A seed determines a cluster, its requests and its faults. The shipped control plane runs on
simulated servers, network and engines. A seed always gives the same run. No process is started.

For a seed that violates an invariant the command that runs it again is printed. Exit code 0: all
invariants held; 1: an invariant was violated; 130: interrupted, after the results so far.

    python -m tests.simulation --seeds 1000
    python -m tests.simulation --seed 17 --trace
    python -m tests.simulation --seeds 1000 --stop --mutant no-fence
"""

import argparse
import sys
import time

from dynamo_lite.cli.arguments import EXIT_FAILED, EXIT_INTERRUPTED
from tests.simulation.draw import draw
from tests.simulation.loop.trace import Trace
from tests.simulation.mutants import MUTANTS
from tests.simulation.play import play
from tests.simulation.report import coverage_lines, verdict_line, violated_lines
from tests.simulation.runner import Lost, play_many
from tests.simulation.scenario import Scenario
from tests.simulation.tally import Played, Tally

#: Seconds between two lines of a file, and between two texts of a terminal's line.
_LINE_S, _REWRITE_S = 10.0, 0.2


def main() -> int:
    options = arguments()
    if options.seed is not None:
        return play_one(options.seed, mutant=options.mutant, show_trace=options.trace)
    seeds = range(options.first or 0, (options.first or 0) + options.seeds)
    return play_range(seeds, jobs=options.jobs, mutant=options.mutant, stop=options.stop)


def arguments() -> argparse.Namespace:
    """Ends with exit code 2 and a message where they are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=_natural, help="run this one seed")
    which.add_argument("--seeds", type=_positive, help="number of seeds to run")
    parser.add_argument("--trace", action="store_true", help="print every event of the seed")
    parser.add_argument("--first", type=_natural, help="first seed of --seeds; default 0")
    parser.add_argument("--jobs", type=_positive, help="processes; default: one per core")
    parser.add_argument("--stop", action="store_true", help="stop at the first violated seed")
    parser.add_argument("--mutant", choices=list(MUTANTS), help="remove one safety mechanism")
    options = parser.parse_args()
    for name in ("first", "jobs", "stop"):
        if options.seeds is None and getattr(options, name):
            parser.error(f"--{name} requires --seeds")
    if options.trace and options.seed is None:
        parser.error("--trace requires --seed")
    return options


def _natural(text: str) -> int:
    return _at_least(0, text)


def _positive(text: str) -> int:
    return _at_least(1, text)


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number from {least} on, got {text!r}")
    return int(text)


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
        f" {scenario.max_queue_wait_s:g} s of them unclaimed,"
        f" redelivery after {scenario.ack_wait_s:.3f} s, {scenario.max_jobs} jobs at most,"
        f" writes up to {scenario.slowest_write_s:g} s, {scenario.token_s:g} s a token",
    ]
    skews = [f"{host} {ahead_s:+.1f} s" for host, ahead_s in scenario.clock_skews]
    lines += [f"  wall clocks: {', '.join(skews)}"] if skews else []
    lines += scenario.planner.lines() if scenario.planner is not None else []
    return lines + [f"  {fault.at_s:10.6f}  {fault}" for fault in scenario.faults]


class _Progress:
    """Seeds done, speed, remaining time: a terminal's line, which is written over; anywhere else a
    line now and then."""

    def __init__(self, wanted: int):
        self.wanted = wanted
        self._began = self._shown = time.monotonic()
        self._width = 0

    def show(self, tally: Tally) -> None:
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if now - self._shown < (_REWRITE_S if terminal else _LINE_S):
            return
        self._shown, line = now, self._text(tally)
        if terminal:
            print(f"\r{line:<{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = len(line)
        else:
            print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Erases the line, so that other lines can be printed."""
        if self._width:
            print(f"\r{'':<{self._width}}\r", end="", file=sys.stderr, flush=True)
            self._width = 0

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


if __name__ == "__main__":
    sys.exit(main())
