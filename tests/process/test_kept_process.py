"""Workers whose process goes on in its other role: the supervisor, the process and the command."""

import signal
from pathlib import Path

import pytest

from dynamo_lite.protocol.planner import Counts
from tests.process.command import eventually, run, serving
from tests.process.test_drain_cli import phases, results
from tests.process.test_scaling import ask
from tests.process.test_switch_cli import KEPT, D, P, ready

pytestmark = pytest.mark.heavy

TWO_P = (f"--{P}.ServiceArgs.workers=2",)


def test_a_process_is_of_one_role_and_of_the_other_and_loses_no_request(tmp_path: Path):
    answers, state = tmp_path / "answers", tmp_path / "state"
    load = (f"--Caller.results={answers}", "--Caller.requests=6", "--Caller.tokens=150")
    with serving(state, *load, *TWO_P, graph=KEPT) as graph:
        graph.wait_line("ready Caller-0")
        eventually(lambda: len(results(answers)) >= 6, "some answers have ended", timeout_s=120)
        pids = {e["pid"] for e in [*ready(graph, P).values(), *ready(graph, D).values()]}
        leases = {e["lease"] for e in [*ready(graph, P).values(), *ready(graph, D).values()]}
        for giver, taker, decoding in ((P, D, 2), (D, P, 1), (P, D, 2), (D, P, 1)):
            done = run("switch", giver, taker, "--state-dir", str(state), timeout_s=120)
            assert done.returncode == 0, done.stdout + done.stderr
            assert phases(done.stdout)[-1] == "READY"
            assert "level 2: drained in" in done.stdout, done.stdout
            assert "engine changed in 0.12 s" in done.stdout
            here = [*ready(graph, P).values(), *ready(graph, D).values()]
            assert {e["pid"] for e in here} == pids
            assert len(ready(graph, D)) == decoding
            # A role's lease is never that of another one.
            new = {e["lease"] for e in here} - leases
            assert len(new) == 1
            leases |= new
            # The log of a process stays where it was begun, and is nobody else's.
            assert len({e["log"] for e in here}) == 3
        asked = len(results(answers))
        eventually(lambda: len(results(answers)) >= asked + 6, "all go on", timeout_s=120)
        wrong = [one for one in results(answers) if not one["exact"] or one["end"] != "length"]
        assert wrong == []
        graph.signal(signal.SIGINT)
        assert graph.end() == 0


def test_a_process_that_cannot_go_on_is_replaced_in_its_new_role(tmp_path: Path):
    broken, state = tmp_path / "broken", tmp_path / "state"
    options = ("--Caller.requests=0", f"--{P}.fail-if={broken}", f"--{D}.ServiceArgs.workers=2")
    with serving(state, *options, graph=KEPT) as graph:
        graph.wait_line("ready Caller-0")
        broken.touch()
        pids = {e["pid"] for e in ready(graph, D).values()}
        assert run("switch", D, P, "--no-wait", "--state-dir", str(state)).returncode == 0
        eventually(lambda: ask(graph, Counts()).switches[0].failures, "it has failed", 60)
        broken.unlink()
        eventually(lambda: ask(graph, Counts()).switches[0].phase == "done", "it is done", 60)
        (switch,) = ask(graph, Counts()).switches
        assert (switch.level, switch.not_kept, switch.change_s) == (1, "told to fail", 0.0)
        entry = ready(graph, P)["PrefillWorker-1"]
        assert entry["pid"] not in pids and entry["log"].endswith("PrefillWorker-1.log")
