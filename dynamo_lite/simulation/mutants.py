"""The shipped parts without one of their safeguards, which the simulation must detect.

They show that its invariants can fail, and run nowhere else.
"""

from dynamo_lite.simulation.client_mutants import CLIENT_MUTANTS
from dynamo_lite.simulation.decode_mutants import DECODE_MUTANTS
from dynamo_lite.simulation.planner_mutants import FOUND_BY as PLANNER_FOUND_BY
from dynamo_lite.simulation.planner_mutants import PLANNER_MUTANTS
from dynamo_lite.simulation.prefill_mutants import PREFILL_MUTANTS
from dynamo_lite.simulation.shipped import Shipped
from dynamo_lite.simulation.switch_mutants import FOUND_BY as SWITCH_FOUND_BY
from dynamo_lite.simulation.switch_mutants import SWITCH_MUTANTS

#: Those that only seeds with planners can find.
PLANNED_MUTANTS: dict[str, type[Shipped]] = {**PLANNER_MUTANTS, **SWITCH_MUTANTS}

#: By the name that the command line takes.
MUTANTS: dict[str, type[Shipped]] = {
    **DECODE_MUTANTS,
    **PREFILL_MUTANTS,
    **CLIENT_MUTANTS,
    **PLANNED_MUTANTS,
}

#: A seed that finds the mutant, for those that few seeds find.
FOUND_BY: dict[str, int] = {
    "no-fence": 405,
    "late-resume": 241,
    "silently-used-up": 54,
    "no-prefix-hold": 82,
    "redelivery-lost": 23,
    "no-attempt-id": 24,
    "moves-from-its-start": 3,
    "heard-after-a-move": 76,
    "loses-held-deltas": 16,
    **PLANNER_FOUND_BY,
    **SWITCH_FOUND_BY,
}
