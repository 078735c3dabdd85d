"""Which seed finds each mutant, in `known_seeds.json`.

A change of the simulation's order of events may need other seeds:

    python -m tests.sim.known_seeds

keeps those that still find their mutants and searches for the others.
"""

import json
import multiprocessing
import sys
from pathlib import Path

from tests.simulation.mutants import MUTANTS
from tests.simulation.planner_draw import has_planner
from tests.simulation.planner_mutants import PLANNER_MUTANTS
from tests.simulation.play import play

FILE = Path(__file__).with_name("known_seeds.json")
#: Seeds that are tried. One of ten has a planner.
BOUND = 3000


def known_seeds() -> dict[str, int]:
    """By the mutant's name."""
    return json.loads(FILE.read_text())


def finds(name: str, seed: int) -> bool:
    """Whether the seed violates the mutant's invariant, and nothing without the mutant."""
    mutant = MUTANTS[name]
    violations = play(seed, shipped=mutant.parts).violations
    return any(mutant.violates in one for one in violations) and not play(seed).violations


def search(name: str) -> tuple[str, int | None]:
    known = known_seeds().get(name)
    planned = name in PLANNER_MUTANTS
    seeds = [seed for seed in range(BOUND) if has_planner(seed) is planned]
    order = seeds if known is None else [known, *seeds]
    return name, next((seed for seed in order if finds(name, seed)), None)


def main() -> int:
    found: dict[str, int] = {}
    with multiprocessing.Pool() as pool:
        for name, seed in pool.imap_unordered(search, MUTANTS):
            print(f"{name}: {'NOT FOUND' if seed is None else seed}", flush=True)
            if seed is not None:
                found[name] = seed
    FILE.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
    return 0 if len(found) == len(MUTANTS) else 1


if __name__ == "__main__":
    sys.exit(main())
