"""The shipped parts without one of their safeguards, which the simulation must detect.

They show that its invariants can fail, and run nowhere else.
"""

from tests.simulation.decode_mutants import DECODE_MUTANTS
from tests.simulation.planner_mutants import PLANNER_MUTANTS
from tests.simulation.prefill_mutants import PREFILL_MUTANTS
from tests.simulation.shipped import Mutant

#: By the name that the command line takes.
MUTANTS: dict[str, Mutant] = {**DECODE_MUTANTS, **PREFILL_MUTANTS, **PLANNER_MUTANTS}
