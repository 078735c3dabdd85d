"""A graph whose numbers of workers follow the load: real processes, servers and supervisor."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.process.command import Serving, run, serving
from tests.started import eventually

pytestmark = pytest.mark.heavy

GRAPH = "tests.process.planned:Planned"
D, P = "VllmWorker", "PrefillWorker"
QUICK = {"tick-s": 0.3, "down-window-s": 4, "cooldown-s": 1, "start-s": 1, "budget-devices": 6}


class Planned:
    def __init__(self, graph: Serving, load: Path):
        self.graph, self._load = graph, load
        self.place = ("--state-dir", str(graph.state_dir))

    def load(self, **load: float) -> None:
        fresh = self._load.with_suffix(".new")
        fresh.write_text(json.dumps(load))
        fresh.replace(self._load)

    def ready(self) -> tuple[int, int]:
        """Of prefill and decode workers."""
        entries = self.graph.processes().values()
        states = [(entry["service"], entry["state"]) for entry in entries]
        return states.count((P, "ready")), states.count((D, "ready"))

    def until(self, *ready: int) -> None:
        eventually(lambda: self.ready() == ready, f"{ready} workers; {self.graph.output}", 120)

    def status(self) -> dict[str, Any]:
        """Also while no planner runs."""
        done = run("planner", "status", "--json", *self.place)
        assert done.stdout, f"exit code {done.returncode}: {done.stderr}"
        return json.loads(done.stdout)

    def until_quiet(self) -> None:
        def quiet() -> bool:
            starting = any(p["state"] == "starting" for p in self.graph.processes().values())
            return not starting and not self.status()["wanted"]["manual"]

        eventually(quiet, "nothing is under way")


@contextmanager
def planned(directory: Path, *arguments: str, **options: Any) -> Iterator[Planned]:
    load = directory / "load.json"
    flags = [f"--Planner.{key}={value}" for key, value in {**QUICK, **options}.items()]
    flags += [f"--{name}.load={load}" for name in (D, P)]
    with serving(
        directory / "state", *flags, "--Graph.grace-s=5", *arguments, graph=GRAPH
    ) as graph:
        graph.wait_line("ready ")
        yield Planned(graph, load)


def test_a_step_of_the_load_is_followed_up_and_down(tmp_path: Path):
    with planned(tmp_path) as graph:
        graph.load(tokens_per_s=2000, jobs=2, requests=15)
        graph.until(3, 2)
        graph.until_quiet()
        planner = graph.graph.processes()["Planner-0"]
        os.kill(planner["pid"], signal.SIGKILL)
        graph.graph.when("Planner-0", lambda p: p["state"] == "ready" and p["restarts"] == 1)
        graph.load()
        graph.until(1, 1)
        graph.until_quiet()
        assert {p["restarts"] for n, p in graph.graph.processes().items() if "W" in n} == {0}


def test_what_an_operator_sets_survives_kills_of_the_planner(tmp_path: Path):
    """Killed again and again, whatever it is about to do, it ends with exactly these numbers."""
    with planned(tmp_path, "--Graph.lease-ttl-s=10") as graph:
        assert run("planner", "pause", *graph.place).returncode == 0
        for restarts, (prefill, decode) in enumerate([(3, 3), (1, 2)]):
            set_ = run("planner", "set", f"{P}={prefill}", f"{D}={decode}", *graph.place)
            assert set_.returncode == 0, set_.stderr
            for kill in range(3):
                number = restarts * 3 + kill
                entry = graph.graph.when(
                    "Planner-0", lambda p, n=number: p["state"] == "ready" and p["restarts"] == n
                )
                os.kill(entry["pid"], signal.SIGKILL)
            graph.until(prefill, decode)
            graph.until_quiet()
            started = [n for n in graph.graph.processes() if n.startswith((P, D))]
            assert len(started) == 6, "no more were ever started than the operator has set"


def test_without_a_planner_the_command_says_so(etcd_url: str, namespace: str, tmp_path: Path):
    place = ("--etcd-url", etcd_url, "--namespace", namespace, "--state-dir", str(tmp_path))
    found = run("planner", "status", *place)
    assert (found.returncode, found.stdout) == (1, "no planner runs\n")
    refused = run("planner", "set", f"{D}=2", *place)
    assert refused.returncode == 1
    assert "no planner runs" in refused.stderr
