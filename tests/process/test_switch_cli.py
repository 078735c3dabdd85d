"""Workers that change their role on the same device: the command, and the planner, under load."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dynamo_lite.protocol.planner import Counts, Remove, SupervisorReply, Switch
from dynamo_lite.serve.processes import is_alive
from tests.process.command import Serving, eventually, run, serving
from tests.process.test_drain_cli import DECODING, phases, results
from tests.process.test_scaling import ask, lease_of, variable

pytestmark = pytest.mark.heavy

SWITCHING = "tests.process.switch_graph:Switching"
#: Its workers keep their engine.
KEPT = "tests.process.switch_graph:Kept"
PLANNED = "tests.process.switch_graph:Planned"
D, P = "VllmWorker", "PrefillWorker"
DEVICES = ("--Graph.devices=[4, GPU-b, 6]", *(f"--{n}.ServiceArgs.devices=1" for n in (D, P)))
COMMAND = (sys.executable, "-m", "dynamo_lite.cli.cli")
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


def test_two_prefill_workers_and_one_decode_worker_become_the_reverse_and_back(tmp_path: Path):
    answers, state = tmp_path / "answers", tmp_path / "state"
    load = (f"--Caller.results={answers}", "--Caller.requests=6", "--Caller.tokens=150")
    with serving(state, *load, *DEVICES, *TWO_P, graph=SWITCHING) as graph:
        graph.wait_line("ready Caller-0")
        eventually(lambda: len(results(answers)) >= 6, "some answers have ended", timeout_s=120)
        before = {device(e): e["pid"] for e in ready(graph, P).values()}
        process = subprocess.Popen(
            [*COMMAND, "switch", P, D, "--state-dir", str(state)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        occupied = Occupied(graph)
        eventually(lambda: occupied.look() and process.poll() is not None, "it ends", 120)
        assert process.stdout is not None
        said = process.stdout.read()
        process.stdout.close()
        assert process.returncode == 0, said
        seen = phases(said)
        assert seen[0] == "UNLISTED" and seen[-3:] == ["GONE", "STARTING", "READY"], said
        assert (len(ready(graph, P)), len(ready(graph, D))) == (1, 2)
        (left,) = {device(e) for e in ready(graph, P).values()}
        gained = {device(e): e["pid"] for e in ready(graph, D).values()}
        assert {left, *gained} == {"4", "GPU-b", "6"}
        assert not set(before.values()) & set(gained.values())
        assert occupied.most == 3
        back = run("switch", D, P, "--state-dir", str(state), timeout_s=120)
        assert back.returncode == 0, back.stdout + back.stderr
        assert phases(back.stdout)[-1] == "READY"
        assert (len(ready(graph, P)), len(ready(graph, D))) == (2, 1)
        asked = len(results(answers))
        eventually(lambda: len(results(answers)) >= asked + 6, "all go on", timeout_s=120)
        wrong = [one for one in results(answers) if not one["exact"] or one["end"] != "length"]
        assert wrong == []
        assert all(entry["restarts"] == 0 for entry in graph.processes().values())
        graph.signal(signal.SIGINT)
        assert graph.end() == 0


def test_a_successor_that_cannot_be_started_is_tried_again_in_its_new_role(tmp_path: Path):
    broken, state = tmp_path / "broken", tmp_path / "state"
    options = ("--Caller.requests=0", f"--{P}.fail-if={broken}", f"--{D}.ServiceArgs.workers=3")
    with serving(state, *options, "--Graph.devices=4", *DEVICES[1:], graph=SWITCHING) as graph:
        graph.wait_line("ready Caller-0")
        broken.touch()
        place = ("--state-dir", str(state))
        late = run("switch", D, P, "--timeout", "15", *place)
        assert late.returncode == 1
        assert "FAILED" in late.stdout and "told to fail; it is tried again" in late.stdout
        assert "error: timeout; the supervisor goes on" in late.stderr
        counts = ask(graph, Counts()).counts
        assert counts[P].devices_free == 0
        assert (counts[P].starting, counts[P].ready, counts[D].ready) == (1, 1, 2)
        entry = graph.processes()["PrefillWorker-1"]
        assert entry["restarts"] >= 1
        refused = run("switch", D, P, *place)
        assert refused.returncode == 1
        assert "a switch is under way: VllmWorker-" in refused.stderr
        broken.unlink()
        again = graph.when("PrefillWorker-1", lambda p: p["state"] == "ready")
        assert (again["service"], again["error"]) == (P, "")
        # The next one is given up; its device is free for any role.
        broken.touch()
        assert run("switch", D, P, "--no-wait", *place).returncode == 0
        eventually(
            lambda: graph.processes().get("PrefillWorker-2", {}).get("restarts"), "it has failed"
        )
        down = run("scale", f"{P}=2", *place)
        assert down.returncode == 0, down.stderr
        assert ask(graph, Counts()).switches[-1].phase == "ended"
        assert ask(graph, Counts()).counts[P].devices_free == 1
        up = run("scale", f"{D}=2", *place)
        assert up.returncode == 0, up.stderr


def test_the_same_order_again_switches_one_worker_only(tmp_path: Path):
    leave_if, state = tmp_path / "leave", tmp_path / "state"
    options = ("--Caller.requests=0", f"--{P}.leave-if={leave_if}")
    with serving(state, *options, *DEVICES, *TWO_P, graph=SWITCHING) as graph:
        graph.wait_line("ready Caller-0")
        first, second = (lease_of(entry) for entry in ready(graph, P).values())

        def order(version: int, lease_id: int, to: str = D) -> SupervisorReply:
            return ask(graph, Switch(component=P, lease_id=lease_id, to=to, version=version))

        assert order(1, first).ok
        again = order(2, first)
        assert again.ok and len(again.switches) == 1
        assert "version 2 is old" in order(2, first).error
        assert "a switch is under way" in order(3, second).error
        assert [one.phase for one in ask(graph, Counts()).switches] == ["draining"]
        leave_if.touch()
        eventually(lambda: ask(graph, Counts()).switches[0].phase == "done", "it is done", 120)
        done = order(4, first)
        assert done.ok and [one.phase for one in done.switches] == ["done"]
        assert (done.counts[P].present, done.counts[D].present) == (1, 2)
        assert "it has this role already" in order(5, second, P).error
        unknown = order(6, 12345)
        assert (unknown.ok, unknown.unknown) == (False, True)
        assert "no service of this graph that can be scaled" in order(7, second, "Caller").error
        leave_if.unlink()
        assert ask(graph, Remove(component=P, lease_id=second, version=8)).ok
        assert "it leaves already" in order(9, second).error
        leave_if.touch()


@pytest.mark.parametrize("moment", ["draining", "starting"])
@pytest.mark.parametrize("kind", [SWITCHING, KEPT])
def test_a_graph_that_ends_during_a_switch_ends_in_order(kind: str, moment: str, tmp_path: Path):
    leave_if, start_if, state = tmp_path / "leave", tmp_path / "start", tmp_path / "state"
    start_if.touch()
    files = (f"--{P}.leave-if={leave_if}", f"--{D}.start-if={start_if}")
    with serving(state, "--Caller.requests=0", *files, *TWO_P, graph=kind) as graph:
        graph.wait_line("ready Caller-0")
        start_if.unlink()
        if moment == "starting":
            leave_if.touch()
        assert run("switch", P, D, "--no-wait", "--state-dir", str(state)).returncode == 0
        eventually(lambda: ask(graph, Counts()).switches[0].phase == moment, moment)
        graph.signal(signal.SIGINT)
        graph.wait_line("a second signal kills all")
        leave_if.touch()
        assert graph.end() == 0
        if kind == SWITCHING:
            started = any("VllmWorker-1" in line and "starts" in line for line in graph.output)
            assert started == (moment == "starting")


def test_what_cannot_be_is_refused_before_anything_is_ordered(tmp_path: Path):
    state, lone = tmp_path / "state", tmp_path / "lone"
    options = ("--Caller.requests=0", *TWO_P, "--Graph.devices=6", f"--{D}.ServiceArgs.devices=2")
    with serving(state, *options, f"--{P}.ServiceArgs.devices=1", graph=SWITCHING) as graph:
        graph.wait_line("ready Caller-0")
        place = ("--state-dir", str(state))
        one = next(iter(ready(graph, D).values()))["lease"]
        for arguments, message in (
            (("Nobody", D), "Nobody: accepted: VllmWorker, PrefillWorker"),
            ((D, D), "it has this role already"),
            ((D, P), "VllmWorker: 1 can work, and one must stay"),
            ((P, D, "-n", "2"), "PrefillWorker: 2 can work, and one must stay"),
            ((P, D, one), f"{one}: no PrefillWorker of this supervisor that is ready"),
            ((P, D, "x y"), "not a lease id"),
            ((P, D, "-n", "2", "--no-wait"), "-n goes with neither LEASE nor --no-wait"),
        ):
            refused = run("switch", *arguments, *place)
            assert refused.returncode == 2, refused.stdout
            assert message in refused.stderr
        # Only the supervisor knows the devices.
        refused = run("switch", P, D, *place)
        assert refused.returncode == 1
        assert "VllmWorker: needs 2 devices, PrefillWorker-" in refused.stderr
        dry = run("switch", P, D, "--dry-run", *place)
        assert dry.returncode == 0 and "dry run: nothing was ordered" in dry.stdout
        assert ask(graph, Counts()).switches == []
        assert {e["restarts"] for e in graph.processes().values()} == {0}
    none = run("switch", P, D, "--state-dir", str(lone))
    assert none.returncode == 1 and "no graph runs on" in none.stderr


def test_a_supervisor_without_the_other_service_cannot_switch(tmp_path: Path):
    with serving(tmp_path, "--Caller.requests=0", graph=DECODING) as graph:
        graph.wait_line("ready Caller-0")
        refused = run("switch", D, P, "--state-dir", str(tmp_path))
        assert refused.returncode == 2
        assert "PrefillWorker: the supervisor of" in refused.stderr
        assert "has no such service that can be scaled; those: VllmWorker" in refused.stderr


QUICK = {
    "tick-s": 0.3,
    "down-window-s": 600,
    "cooldown-s": 1,
    "start-s": 1,
    "young-s": 0.1,
    "decode-max-num-seqs": 4,
    "budget-devices": 3,
}


@pytest.mark.parametrize("kill", ["", "draining", "starting"])
def test_the_planner_switches_a_worker_under_load_also_when_it_is_killed(kill: str, tmp_path: Path):
    """Six requests need two decode workers of four; the budget has three devices."""
    answers, state = tmp_path / "answers", tmp_path / "state"
    flags = [f"--Planner.{key}={value}" for key, value in QUICK.items()]
    load = (f"--Caller.results={answers}", "--Caller.requests=6", "--Caller.tokens=100")
    held = {"draining": tmp_path / "leave", "starting": tmp_path / "start"}
    files = (f"--{P}.leave-if={held['draining']}", f"--{D}.start-if={held['starting']}")
    for file in held.values():
        file.touch()
    place = ("--state-dir", str(state))

    def status() -> dict[str, Any]:
        return json.loads(run("planner", "status", "--json", *place).stdout)

    def asked_for() -> bool:
        text = run("planner", "status", *place).stdout
        return "under way: switch of PrefillWorker" in text and ", asked, for " in text

    def phase(graph: Serving) -> str:
        switches = ask(graph, Counts()).switches
        return switches[0].phase if switches else ""

    leases = ("--Graph.lease-ttl-s=10", *files)
    with serving(state, *flags, *load, *leases, *DEVICES, *TWO_P, graph=PLANNED) as graph:
        graph.wait_line("ready Caller-0")
        occupied = Occupied(graph)
        if kill:
            held[kill].unlink()
            eventually(lambda: occupied.look() and phase(graph) == kill, kill, 120)
            os.kill(graph.processes()["Planner-0"]["pid"], signal.SIGKILL)
            graph.when("Planner-0", lambda p: p["state"] == "ready" and p["restarts"] == 1)
            # Killed before it had written that it has asked, the new one asks again when it leads.
            eventually(asked_for, "the new planner goes on with the switch")
            held[kill].touch()
        done = f"a worker is switched; {graph.output}"
        eventually(lambda: occupied.look() and phase(graph) == "done", done, 120)
        eventually(lambda: status()["switch"]["phase"] == "ended", "the planner knows it")
        assert (len(ready(graph, P)), len(ready(graph, D))) == (1, 2)
        asked = len(results(answers))
        eventually(lambda: len(results(answers)) >= asked + 6, "all go on", timeout_s=120)
        wrong = [one for one in results(answers) if not one["exact"] or one["end"] != "length"]
        assert wrong == []
        assert len(ask(graph, Counts()).switches) == 1
        if not kill:
            explained = run("planner", "explain", *place)
            assert "does: PrefillWorker -> VllmWorker: one becomes a decode worker" in (
                explained.stdout
            )
            # Below the planner's minimum.
            refused = run("switch", P, D, *place)
            assert refused.returncode == 2
            assert "0 PrefillWorker: the planner's minimum is 1" in refused.stderr
