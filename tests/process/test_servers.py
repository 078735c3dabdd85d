"""The servers that a graph brings along: they may die, freeze, and come back."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from dynamo_lite.serve.processes import is_alive
from tests.process.command import Serving, invoke, serving
from tests.started import eventually

SERVERS = ("nats-server", "etcd")


def server(graph: Serving, name: str) -> dict[str, Any]:
    """Its entry in run.json."""
    [entry] = [entry for entry in graph.run_json()["servers"] if entry["name"] == name]
    return entry


def restarted(graph: Serving, name: str, times: int) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        entry = server(graph, name)
        return entry if entry["pid"] and entry["restarts"] == times else None

    return eventually(look, f"{name} is restarted")


def listing(state_dir: Path) -> dict[str, int]:
    """What `ps` shows: pids by lease."""
    shown = invoke("ps", "--json", "--state-dir", str(state_dir))
    assert shown.returncode == 0, shown.stderr
    return {row["lease"]: row["pid"] for row in json.loads(shown.stdout)}


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_that_dies_is_back_at_once(tmp_path: Path, name: str):
    with serving(tmp_path, until="ready http") as graph:
        before, processes = graph.run_json(), graph.processes()
        members = listing(tmp_path)
        assert set(members) == {entry["lease"] for entry in processes.values()}
        for times in (1, 2):
            victim = server(graph, name)["pid"]
            os.kill(victim, signal.SIGKILL)
            graph.wait_line(f"{name}{' ' * (16 - len(name))} ended (signal 9); restarting ")
            graph.wait_line("restarted")
            again = restarted(graph, name, times)
            assert again["pid"] != victim
            assert is_alive(again["pid"])
        assert graph.run_json() == {**before, "servers": graph.run_json()["servers"]}
        assert graph.processes() == processes
        # An etcd that is killed loses what it has not written yet; its owners put it back.
        eventually(lambda: listing(tmp_path) == members, "all are listed")
        assert graph.end(signal.SIGINT) == 0
        assert not is_alive(again["pid"])


def test_both_may_die_while_the_graph_starts(tmp_path: Path):
    release = tmp_path / "release"
    with serving(tmp_path / "state", f"--Back.ready={release}") as graph:
        graph.wait_line("Back-0           stubbing")
        for name in SERVERS:
            os.kill(server(graph, name)["pid"], signal.SIGKILL)
        for name in SERVERS:
            restarted(graph, name, 1)
        graph.wait_line("Back-0           still stubbing")
        release.touch()
        graph.wait_line("ready http")
        leases = {entry["lease"] for entry in graph.processes().values()}
        eventually(lambda: set(listing(tmp_path / "state")) == leases, "all are listed")


@pytest.mark.parametrize("name", SERVERS)
def test_a_frozen_server_is_left_alone(tmp_path: Path, name: str):
    with serving(tmp_path, until="ready http") as graph:
        entry, processes = server(graph, name), graph.processes()
        os.kill(entry["pid"], signal.SIGSTOP)
        os.kill(processes["Back-0"]["pid"], signal.SIGKILL)  # something else is to be done
        graph.wait_line("Back-0           ended (signal 9)")
        os.kill(entry["pid"], signal.SIGCONT)
        graph.when("Back-0", lambda p: p["state"] == "ready" and p["restarts"] == 1)
        assert server(graph, name) == entry
        os.kill(entry["pid"], signal.SIGSTOP)
        began = time.monotonic()
        assert graph.end(signal.SIGINT) == 0
        assert time.monotonic() - began < 30
        assert not is_alive(entry["pid"])


def break_etcd(graph: Serving, state_dir: Path) -> None:
    """Kills it, and sees to it that it cannot be started."""
    data = state_dir / "dynamo-lite-servers" / "etcd" / "data"
    data.rename(data.with_name("moved"))
    data.touch()
    os.kill(server(graph, "etcd")["pid"], signal.SIGKILL)
    graph.wait_line("etcd ended while it started; its log")


def test_a_server_that_cannot_be_started_again_ends_the_graph(tmp_path: Path):
    with serving(tmp_path, until="ready http") as graph:
        graph.processes()
        break_etcd(graph, tmp_path)
        assert server(graph, "etcd")["pid"] == 0
        assert graph.end() == 1
        text = graph.output
        assert "error: etcd cannot be restarted: etcd ended while it started" in text
        assert text.count("etcd ended while it started; its log") == 6
        assert "failed to list data directory: " in text and ": not a directory" in text
        assert not (tmp_path / "run.json").exists()


def test_an_interrupt_while_a_server_cannot_be_started(tmp_path: Path):
    """Nor is the drain cut short when the tries are over."""
    release = tmp_path / "release"
    with serving(tmp_path / "state", f"--Front.release={release}", until="ready http") as graph:
        graph.processes()
        break_etcd(graph, tmp_path / "state")
        graph.signal(signal.SIGINT)
        graph.wait_line("Front-0          draining")
        graph.wait_line("restarting in 5 s")  # one more than would end a graph that is to live
        release.touch()
        assert graph.end() == 0


def test_a_frozen_server_does_not_outlive_a_killed_supervisor(tmp_path: Path):
    with serving(tmp_path, until="ready http") as graph:
        graph.processes()
        pids = [server(graph, name)["pid"] for name in SERVERS]
        os.kill(pids[0], signal.SIGSTOP)
        graph.end(signal.SIGKILL)
        eventually(lambda: not any(map(is_alive, pids)), "both end with it")
