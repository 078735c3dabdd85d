"""Simulates whole clusters with faults in virtual time, and checks the invariants.

A seed determines a cluster, its requests and its faults. The shipped control plane runs on
simulated servers, network and engines. A seed always gives the same run. No process is started.

For a seed that violates an invariant the command that runs it again is printed. Exit code 0: all
invariants held; 1: an invariant was violated.

    python -m tests.simulation --seeds 1000
    python -m tests.simulation --seed 17
    python -m tests.simulation --seeds 1000 --stop --mutant no-cell
"""

import argparse
import sys
import time
from contextlib import closing

from dynamo_lite.cli.arguments import EXIT_FAILED
from tests.simulation.draw import draw
from tests.simulation.loop.loop import Trace
from tests.simulation.mutants import MUTANTS
from tests.simulation.play import Tally, play, play_many, violated_lines

#: Seconds between two lines that say how far it is.
_LINE_S = 10.0


def main() -> int:
    options = arguments()
    if options.seed is not None:
        return play_one(options.seed, options.mutant)
    seeds = range(options.first, options.first + options.seeds)
    return play_range(seeds, options.mutant, stop=options.stop)


def arguments() -> argparse.Namespace:
    """Ends with exit code 2 and a message where they are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="run this one seed, and print all of its events")
    which.add_argument("--seeds", type=int, help="number of seeds to run")
    parser.add_argument("--first", type=int, default=0, help="first seed of --seeds; default 0")
    parser.add_argument("--stop", action="store_true", help="stop at the first violated seed")
    parser.add_argument("--mutant", choices=list(MUTANTS), help="remove one safety mechanism")
    return parser.parse_args()


def play_one(seed: int, mutant: str | None) -> int:
    """Returns the exit code."""
    for name, value in vars(draw(seed)).items():
        if name != "asks":
            print(f"  {name}: {value}")
    trace = Trace(on=True)
    played = play(seed, shipped=MUTANTS[mutant].parts if mutant else None, trace=trace)
    for line in trace.text():
        print(line)
    for violation in played.violations:
        print(f"violated at {violation}")
    print(f"seed {seed}: {'violated' if played.violations else 'no invariant violated'}")
    return EXIT_FAILED if played.violations else 0


def play_range(seeds: range, mutant: str | None, *, stop: bool) -> int:
    """Returns the exit code. stop: end at the first violated seed."""
    tally, began = Tally(), time.monotonic()
    shown = began
    with closing(play_many(seeds, mutant)) as outcomes:
        for played in outcomes:
            tally.add(played)
            if played.violations:
                lines = violated_lines(played.seed, played.violations[0], mutant)
                print("\n".join(lines), flush=True)
                if stop:
                    break
            if time.monotonic() - shown > _LINE_S:
                shown = time.monotonic()
                print(f"{tally.seeds:,} of {len(seeds):,} seeds", file=sys.stderr, flush=True)
    for name, number in sorted(tally.counts.items()):
        print(f"{number:10,}  {name}")
    bad = f"{len(tally.violated):,} violated" if tally.violated else "no invariant violated"
    print(f"{tally.seeds:,} seeds played: {bad}")
    print(f"{tally.seeds / (time.monotonic() - began):.1f} seeds/s", file=sys.stderr)
    return EXIT_FAILED if tally.violated else 0


if __name__ == "__main__":
    sys.exit(main())
