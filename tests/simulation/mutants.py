"""The shipped parts without one of their safeguards, which the simulation must detect.

They show that its invariants can fail, and run nowhere else.
"""

from tests.simulation.client_mutants import CLIENT_MUTANTS
from tests.simulation.decode_mutants import DECODE_MUTANTS
from tests.simulation.mutant import Mutant
from tests.simulation.operation_mutants import OPERATION_MUTANTS
from tests.simulation.planner_mutants import PLANNER_MUTANTS
from tests.simulation.prefill_mutants import PREFILL_MUTANTS

#: Those that only seeds with planners can find.
PLANNED_MUTANTS: dict[str, Mutant] = {
    **PLANNER_MUTANTS,
    **OPERATION_MUTANTS,
}

#: By the name that the command line takes.
MUTANTS: dict[str, Mutant] = {
    **DECODE_MUTANTS,
    **PREFILL_MUTANTS,
    **CLIENT_MUTANTS,
    **PLANNED_MUTANTS,
}
