"""A device that goes from one role to the other under load, by the command and by the planner: one
worker is removed, then one is added."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dynamo_lite.protocol.planner import Counts
from dynamo_lite.serve.processes import is_alive
from tests.process.command import Serving, ask, eventually, results, run, serving, variable

pytestmark = pytest.mark.heavy

PLANNED = "tests.process.roles_graph:Planned"
CALLED = "tests.process.roles_graph:Called"
D, P = "VllmWorker", "PrefillWorker"
DEVICES = ("--Graph.devices=[4, GPU-b, 6]", *(f"--{n}.ServiceArgs.devices=1" for n in (D, P)))
TWO_P = (f"--{P}.ServiceArgs.workers=2",)


def ready(graph: Serving, service: str) -> dict[str, dict[str, Any]]:
    return {
        name: entry
        for name, entry in graph.processes().items()
        if entry["service"] == service and entry["state"] == "ready"
    }


def device(entry: dict[str, Any]) -> str | None:
    return variable(entry["pid"], "CUDA_VISIBLE_DEVICES")


class Occupied:
    """Looks again and again which live processes have which device."""

    def __init__(self, graph: Serving):
        self._graph = graph
        self.most = 0

    def look(self) -> bool:
        held: list[str] = []
        for entry in [*ready(self._graph, D).values(), *ready(self._graph, P).values()]:
            try:
                found = device(entry) if is_alive(entry["pid"]) else None
            except OSError:
                continue
            held += [found] if found else []
        assert len(held) == len(set(held)), held
        counts = ask(self._graph, Counts()).counts.values()
        present = sum(one.present for one in counts)
        self.most = max(self.most, present)
        assert present <= 3
        return True


def go_on(answers: Path) -> None:
    """All requests go on, and none had a wrong answer."""
    asked = len(results(answers))
    eventually(lambda: len(results(answers)) >= asked + 6, "all go on", timeout_s=120)
    wrong = [one for one in results(answers) if not one["exact"] or one["end"] != "length"]
    assert wrong == []


def test_by_command_there_and_back(tmp_path: Path):
    answers, state = tmp_path / "answers", tmp_path / "state"
    load = (f"--Caller.results={answers}", "--Caller.requests=6", "--Caller.tokens=150")
    place = ("--state-dir", str(state))
    with serving(state, *load, *DEVICES, *TWO_P, graph=CALLED) as graph:
        graph.wait_line("ready Caller-0")
        eventually(lambda: len(results(answers)) >= 6, "some answers have ended", timeout_s=120)
        occupied = Occupied(graph)
        for less, more, numbers in ((P, D, (1, 2)), (D, P, (2, 1))):
            full = run("scale", f"{more}=2", *place)
            assert full.returncode == 1 and "needs 1 devices, 0 are free" in full.stderr
            for target in (f"{less}=1", f"{more}=2"):
                done = run("scale", target, *place, timeout_s=120)
                assert done.returncode == 0, done.stdout + done.stderr
                assert occupied.look()
            assert (len(ready(graph, P)), len(ready(graph, D))) == numbers
            held = {device(e) for e in [*ready(graph, P).values(), *ready(graph, D).values()]}
            assert held == {"4", "GPU-b", "6"}
        go_on(answers)
        assert all(entry["restarts"] == 0 for entry in graph.processes().values())
        graph.signal(signal.SIGINT)
        assert graph.end() == 0


QUICK = {
    "tick-s": 0.3,
    "down-window-s": 600,
    "cooldown-s": 1,
    "start-s": 1,
    "budget-devices": 3,
}


@pytest.mark.parametrize("kill", ["", "draining", "starting"])
def test_by_the_planner_also_when_it_is_killed(kill: str, tmp_path: Path):
    """Six requests need two decode workers of six; the budget has three devices."""
    answers, state = tmp_path / "answers", tmp_path / "state"
    flags = [f"--Planner.{key}={value}" for key, value in QUICK.items()]
    load = (f"--Caller.results={answers}", "--Caller.requests=6", "--Caller.tokens=100")
    held = {"draining": tmp_path / "leave", "starting": tmp_path / "start"}
    files = (f"--{P}.leave-if={held['draining']}", f"--{D}.start-if={held['starting']}")
    for file in held.values():
        file.touch()
    place = ("--state-dir", str(state))
    under_way = {"draining": f"under way: remove {P}", "starting": f"under way: add {D}"}

    def asked_for() -> bool:
        text = run("planner", "status", *place).stdout
        return under_way[kill] in text and ", asked, for " in text

    def reached(graph: Serving) -> bool:
        found = ask(graph, Counts()).counts
        return bool(found[P].draining if kill == "draining" else found[D].starting)

    leases = ("--Graph.lease-ttl-s=10", *files)
    with serving(state, *flags, *load, *leases, *DEVICES, *TWO_P, graph=PLANNED) as graph:
        graph.wait_line("ready Caller-0")
        occupied = Occupied(graph)
        if kill:
            held[kill].unlink()
            eventually(lambda: occupied.look() and reached(graph), kill, 120)
            os.kill(graph.processes()["Planner-0"]["pid"], signal.SIGKILL)
            graph.when("Planner-0", lambda p: p["state"] == "ready" and p["restarts"] == 1)
            # Killed before it had written that it has asked, the new one asks again when it leads.
            eventually(asked_for, "the new planner goes on with it")
            held[kill].touch()

        def moved() -> bool:
            assert occupied.look()
            return (len(ready(graph, P)), len(ready(graph, D))) == (1, 2)

        eventually(moved, f"a device has moved; {graph.output}", 120)

        def operations() -> Any:
            return json.loads(run("planner", "status", "--json", *place).stdout)["operations"]

        eventually(lambda: not operations(), "the planner knows it")
        go_on(answers)
        assert occupied.look()
        started = [name for name in graph.processes() if name.startswith((D, P))]
        assert len(started) == 4, "one was removed and one was added"
        if not kill:
            log = Path(graph.processes()["Planner-0"]["log"]).read_text()
            assert f"does: {P} -1 (one): makes room for a decode worker" in log
            assert f"does: {D} +1: 1 more" in log
