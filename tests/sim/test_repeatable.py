"""A seed is a run: the same one in every interpreter, watched or not."""

import os
import subprocess
import sys

import pytest

from tests.simulation.loop.loop import Trace
from tests.simulation.play import play

pytestmark = pytest.mark.heavy

SEEDS = range(6)


def played(seed: int) -> tuple[str, str]:
    trace = Trace(on=True)
    outcome = play(seed, trace=trace)
    return outcome.fingerprint, trace.digest()


def test_a_trace_changes_nothing():
    for seed in SEEDS:
        first = played(seed)
        assert first == played(seed)
        assert first[0] == play(seed).fingerprint


def test_no_run_depends_on_the_order_of_sets_or_on_runs_before_it():
    code = f"from tests.sim.test_repeatable import played; print([played(s) for s in {SEEDS!r}])"
    expected = str([played(seed) for seed in reversed(SEEDS)][::-1])
    # Sets have another order for each of these.
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        printed = subprocess.check_output([sys.executable, "-c", code], env=env, text=True)
        assert printed.strip() == expected
