"""The shipped parts without one of their safeguards, which the simulation must detect.

They show that its invariants can fail, and run nowhere else.
"""

from dynamo_lite.simulation.client_mutants import CLIENT_MUTANTS
from dynamo_lite.simulation.decode_mutants import DECODE_MUTANTS
from dynamo_lite.simulation.planner_mutants import FOUND_BY as PLANNER_FOUND_BY
from dynamo_lite.simulation.planner_mutants import PLANNER_MUTANTS
from dynamo_lite.simulation.prefill_mutants import PREFILL_MUTANTS
from dynamo_lite.simulation.shipped import Shipped

#: By the name that the command line takes.
MUTANTS: dict[str, type[Shipped]] = {
    **DECODE_MUTANTS,
    **PREFILL_MUTANTS,
    **CLIENT_MUTANTS,
    **PLANNER_MUTANTS,
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
    **PLANNER_FOUND_BY,
}
