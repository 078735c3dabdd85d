"""Processes that are added to a running graph and retired, over the supervisor's socket."""

import asyncio
import os
import signal
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from dynamo_lite.protocol.errors import Unavailable
from dynamo_lite.protocol.planner import Counts, RoleCounts, SupervisorReply, Want
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.supervisor_client import short_address
from dynamo_lite.serve.processes import is_alive
from tests.process.command import Serving, ask, invoke, run, serving, variable
from tests.started import eventually


def counts(graph: Serving) -> tuple[int, int, int]:
    """Of Back: starting, ready, draining."""
    back = ask(graph, Counts()).counts["Back"]
    return back.starting, back.ready, back.draining


def want(graph: Serving, count: int, component: str = "Back", lease: int = 0) -> SupervisorReply:
    """lease: of the one to remove."""
    version = ask(graph, Counts()).version
    leases = (lease,) if lease else ()
    order = Want(component=component, count=count, leases=leases, version=version)
    return ask(graph, order)


def lease_of(entry: Any) -> int:
    return int(entry["lease"], 16)


def ready(entry: Any) -> bool:
    return entry["state"] == "ready"


def test_one_is_added_and_another_retired(tmp_path: Path):
    with serving(tmp_path, until="ready http") as graph:
        path = tmp_path / "supervisor.sock"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        first = graph.processes()["Back-0"]
        reply = want(graph, 2)
        assert (reply.error, reply.version) == ("", 1)
        assert reply.counts == {"Back": RoleCounts(starting=1, ready=1, leases=(lease_of(first),))}
        eventually(lambda: "Back-1" in graph.processes(), "it is listed")
        graph.when("Back-1", ready)
        assert counts(graph) == (0, 2, 0)
        assert want(graph, 1, lease=lease_of(first)).counts["Back"].draining == 1
        graph.wait_line("Back-0           left the graph")
        assert graph.when("Back-0", lambda p: p["state"] == "stopped")["restarts"] == 0
        assert counts(graph) == (0, 1, 0)
        # It is gone: the same order again is no mistake, and removes no other one.
        assert not want(graph, 1, lease=lease_of(first)).error
        assert not want(graph, 0, lease=lease_of(first)).error
        assert counts(graph) == (0, 1, 0)
        # The number is free again.
        assert not want(graph, 2).error
        again = graph.when("Back-0", ready)
        assert again["pid"] != first["pid"]
        assert graph.end(signal.SIGINT) == 0
        assert not path.exists()


def test_one_that_cannot_be_started_is_given_up_and_one_that_crashes_is_removed_first(
    tmp_path: Path,
):
    broken, state = tmp_path / "broken", tmp_path / "state"
    with serving(state, f"--Back.fail-if={broken}", until="ready http") as graph:
        before = graph.processes()
        broken.touch()
        done = invoke("scale", "Back=2", "--state-dir", str(state))
        assert done.returncode == 1
        assert "error: Back: 1 of 2 are left: Back-1: told to fail" in done.stderr
        graph.wait_line("the last line of the log")
        failed = graph.when("Back-1", lambda p: p["state"] == "failed")
        assert failed["error"] == "Back-1: told to fail"
        assert counts(graph) == (0, 1, 0)
        broken.unlink()
        assert invoke("scale", "Back=2", "--state-dir", str(state)).returncode == 0
        after = graph.processes()
        assert after["Back-1"]["error"] == ""
        assert all(after[name]["pid"] == before[name]["pid"] for name in before)
        broken.touch()
        os.kill(before["Back-0"]["pid"], signal.SIGKILL)
        graph.when("Back-0", lambda p: p["state"] == "backoff")
        down = invoke("scale", "Back=1", "--state-dir", str(state))
        assert down.returncode == 0, down.stderr
        assert down.stdout.splitlines()[0] == "Back: -1"
        left = graph.processes()
        assert left["Back-0"]["state"] == "stopped"
        assert ready(left["Back-1"]) and left["Back-1"]["pid"] == after["Back-1"]["pid"]


@pytest.mark.parametrize("how", ["retired", "revoked"])
def test_one_that_is_killed_in_its_drain_does_not_come_back(tmp_path: Path, how: str):
    release, state = tmp_path / "release", tmp_path / "state"
    with serving(state, f"--Back.release={release}", "--Back.ServiceArgs.workers=2") as graph:
        graph.wait_line("ready http")
        entry = graph.processes()["Back-1"]
        if how == "retired":
            assert not want(graph, 1, lease=lease_of(entry)).error
        else:
            asyncio.run(revoke(graph.run_json()["etcd"], lease_of(entry)))
        graph.wait_line("Back-1           draining")
        assert counts(graph) == (0, 1, 1)
        os.kill(entry["pid"], signal.SIGKILL)
        graph.wait_line("Back-1           left the graph")
        stopped = graph.when("Back-1", lambda p: p["state"] == "stopped")
        assert stopped["restarts"] == 0
        assert (stopped["pid"], stopped["status_url"]) == (0, "")
        assert counts(graph) == (0, 1, 0)
        release.touch()


async def revoke(etcd_url: str, lease_id: int) -> None:
    async with EtcdStore(etcd_url) as store:
        assert await store.revoke(lease_id)


def test_each_gets_devices_of_its_own(tmp_path: Path):
    devices = ("--Graph.devices=[4, GPU-b, 6, 7]", "--Back.ServiceArgs.devices=2")
    with serving(tmp_path, *devices, until="ready http") as graph:
        first = graph.processes()["Back-0"]
        assert variable(first["pid"], "CUDA_VISIBLE_DEVICES") == "4,GPU-b"
        assert ask(graph, Counts()).counts["Back"] == RoleCounts(
            ready=1, devices_each=2, devices_free=2, leases=(lease_of(first),)
        )
        assert want(graph, 2).counts["Back"].devices_free == 0
        second = graph.when("Back-1", ready)
        assert variable(second["pid"], "CUDA_VISIBLE_DEVICES") == "6,7"
        # A crash keeps them.
        os.kill(first["pid"], signal.SIGKILL)
        again = graph.when("Back-0", lambda p: ready(p) and p["restarts"] == 1)
        assert variable(again["pid"], "CUDA_VISIBLE_DEVICES") == "4,GPU-b"


def test_a_run_json_that_cannot_be_written_costs_no_graph(tmp_path: Path):
    with serving(tmp_path, "--Graph.devices=2", "--Back.ServiceArgs.devices=1") as graph:
        graph.wait_line("ready http")
        assert variable(graph.processes()["Back-0"]["pid"], "CUDA_VISIBLE_DEVICES") == "0"
        # The temporary file of run.json.
        blocked = tmp_path / f".run.json.{graph.pid}"
        blocked.mkdir()
        assert not want(graph, 2).error
        graph.wait_line("cannot write")
        eventually(lambda: counts(graph) == (0, 2, 0), "it is ready")
        blocked.rmdir()
        assert "0 are free" in want(graph, 3).error
        os.kill(graph.processes()["Back-0"]["pid"], signal.SIGKILL)
        graph.when("Back-0", lambda p: ready(p) and p["restarts"] == 1)
        assert ready(graph.processes()["Back-1"])


def test_the_command_scales_up_and_down(tmp_path: Path):
    with serving(tmp_path, until="ready http") as graph:
        up = run("scale", "Back=3", "--state-dir", str(tmp_path))
        assert up.returncode == 0, up.stderr
        assert up.stdout.splitlines()[-1].endswith("s  Back: 3 ready of 3")
        down = invoke("scale", "Back=1", "--state-dir", str(tmp_path))
        assert down.returncode == 0, down.stderr
        assert down.stdout.splitlines()[-1].endswith("s  Back: 1 ready of 1")
        states = {name: entry["state"] for name, entry in graph.processes().items()}
        assert sorted(states.values()) == ["ready", "ready", "stopped", "stopped"]
        for arguments, message in (
            (("Back",), "Back: expected COMPONENT=NUMBER"),
            (("Front=2",), "Front: this graph has no such service that can be scaled; those: Back"),
            (("Back=0",), "Back=0 would remove the last one; --force removes it"),
        ):
            wrong = invoke("scale", *arguments, "--state-dir", str(tmp_path))
            assert (wrong.returncode, message in wrong.stderr) == (2, True), wrong.stderr
        assert counts(graph) == (0, 1, 0)
    none = invoke("scale", "Back=2", "--state-dir", str(tmp_path))
    assert (none.returncode, "no graph runs on" in none.stderr) == (1, True)


def test_orders_that_are_refused(tmp_path: Path):
    """An order that was decided before the last one, and what is no order, change nothing."""
    with serving(tmp_path, until="ready http") as graph:
        assert "Front: no service" in want(graph, 2, "Front").error
        assert "that can be scaled: Back" in want(graph, 2, "Nobody").error
        assert "leases: " in want(graph, 0, lease=1).error
        with pytest.raises(Unavailable, match="version 2 is old"):
            ask(graph, Want(component="Back", count=2, version=2))
        with raw(tmp_path) as (connection, answers):
            connection.sendall(
                b'{"type":"want","component":"Back","count":2,"version":3,"env":{}}\n'
            )
            assert b"not a request" in answers.readline()
            assert answers.readline() == b"", "one request for each connection"
        with raw(tmp_path) as (connection, answers):
            connection.sendall(b"noise\n")
            assert b"not a request" in answers.readline()
        with raw(tmp_path) as (connection, answers):
            # Too long a line costs the connection only.
            connection.sendall(b"x" * (70 << 10))
            assert answers.readline() == b""
        assert counts(graph) == (0, 1, 0)
        pids = [entry["pid"] for entry in graph.processes().values()]
        graph.end(signal.SIGKILL)
        eventually(lambda: not any(is_alive(pid) for pid in pids), "children end with it")
    with serving(tmp_path) as graph:
        # The socket that a killed supervisor has left is replaced.
        graph.wait_line("ready http")
        assert counts(graph) == (0, 1, 0)


class raw:
    """A connection to the socket, and its answers as a file."""

    def __init__(self, state_dir: Path):
        self._path = state_dir / "supervisor.sock"
        self._socket = socket.socket(socket.AF_UNIX)

    def __enter__(self) -> tuple[socket.socket, Any]:
        self._socket.settimeout(20)
        with short_address(self._path) as address:
            self._socket.connect(address)
        self._answers = self._socket.makefile("rb")
        return self._socket, self._answers

    def __exit__(self, *_: object) -> None:
        self._answers.close()
        self._socket.close()


def test_no_orders_before_the_graph_is_ready_and_a_start_is_cancelled(tmp_path: Path):
    """A socket's address has at most 107 characters, and the path of a folder may have more."""
    may_start = tmp_path / "may-start"
    deep = tmp_path / ("d" * 90) / "state"
    with serving(deep, f"--Back.ready={may_start}", until="stubbing") as graph:
        assert "the graph is starting" in want(graph, 2).error
        may_start.touch()
        graph.wait_line("ready http")
        assert counts(graph) == (0, 1, 0)
        may_start.unlink()
        assert not want(graph, 2).error
        graph.wait_line("Back-1           stubbing")
        assert counts(graph) == (1, 1, 0)
        assert not want(graph, 1).error
        graph.when("Back-1", lambda p: p["state"] == "stopped")
        assert counts(graph) == (0, 1, 0)
        lease = graph.processes()["Back-0"]["lease"]
        refused = f"Back: no other process is starting or was named; leases: {lease}"
        assert want(graph, 0).error == refused
