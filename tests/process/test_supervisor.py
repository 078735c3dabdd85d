"""What the supervisor promises about its processes, with stub components."""

import asyncio
import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_lite.protocol.names import components_prefix
from dynamo_lite.runtime.address import parse_nats_url
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.serve.processes import is_alive
from tests.process.command import STUB, Serving, serving
from tests.started import PATIENCE_S, ROOT, eventually, group_members


def test_starts_tells_and_drains_in_order(tmp_path: Path):
    with serving(tmp_path, "--Back.ServiceArgs.workers=2", "--Back.grandchild=true") as graph:
        assert graph.wait_line("ready http://127.0.0.1:1")
        assert graph.wait_line("curl http://127.0.0.1:1/v1/chat/completions")
        state = graph.run_json()
        assert stat.S_IMODE((tmp_path / "run.json").stat().st_mode) == 0o600
        assert (state["state"], state["http"]) == ("ready", "http://127.0.0.1:1")
        login = tmp_path / "dynamo-lite-servers" / "nats" / "login"
        assert re.fullmatch(rf"nats://127.0.0.1:\d+\?login={re.escape(str(login))}", state["nats"])
        assert stat.S_IMODE(login.stat().st_mode) == 0o600
        assert state["etcd"].startswith("https://127.0.0.1:")
        assert state["certificates"] == "" and not (tmp_path / "certificates").exists()
        assert login.read_text() == parse_nats_url(state["nats"]).token
        assert "key.pem" not in graph.output
        (line,) = [line for line in graph.output.splitlines() if "look into etcd: " in line]
        told = line.partition("etcd: ")[2].split()
        listed = subprocess.run(told, capture_output=True, text=True, timeout=60)
        assert "dynamo/components/Back/" in listed.stdout, listed.stderr
        entries = graph.processes()
        assert set(entries) == {"Front-0", "Back-0", "Back-1"}
        for entry in entries.values():
            assert entry["state"] == "ready"
            assert int(entry["lease"], 16) > 0
            assert entry["status_url"].startswith("http://127.0.0.1:")
        assert graph.end(signal.SIGINT) == 0
        text = graph.output
        assert text.index("Front-0          draining") < text.index("Back-0           draining")
        assert not (tmp_path / "run.json").exists() and not (tmp_path / "etcdctl").exists()
    for name in entries:
        assert "closed" in (tmp_path / "logs" / f"{name}.log").read_text()


def test_a_callee_drains_when_its_callers_have_but_need_not_wait_for_their_end(tmp_path: Path):
    release, closed = tmp_path / "release", tmp_path / "closed"
    with serving(tmp_path, f"--Front.release={release}", f"--Front.closed={closed}") as graph:
        graph.wait_line("ready http")
        graph.signal(signal.SIGTERM)
        graph.when("Front-0", lambda p: p["state"] == "draining")
        assert graph.processes()["Back-0"]["state"] == "ready"
        release.touch()
        graph.wait_line("Back-0           draining")
        graph.when("Back-0", lambda p: p["state"] == "stopped")
        assert is_alive(graph.processes()["Front-0"]["pid"])
        closed.touch()
        assert graph.end() == 0


def test_restarts_what_crashed_with_its_grandchildren_swept(tmp_path: Path):
    with serving(tmp_path, "--Back.grandchild=true", until="ready http") as graph:
        before = graph.processes()
        first = before["Back-0"]
        assert len(group_members(first["pid"])) >= 2
        os.kill(first["pid"], signal.SIGKILL)
        graph.wait_line("ended (signal 9); restarting in 0.5 s")
        assert not asyncio.run(known(graph, first["lease"])), "its lease was revoked"
        assert asyncio.run(known(graph, before["Front-0"]["lease"]))
        again = graph.when("Back-0", lambda p: p["state"] == "ready" and p["restarts"] == 1)
        assert again["pid"] != first["pid"] and again["lease"] != first["lease"]
        assert group_members(first["pid"]) == []
        assert graph.processes()["Front-0"]["pid"] == before["Front-0"]["pid"]


async def known(graph: Serving, lease: str) -> bool:
    """Whether the process with this lease is still registered."""
    state = graph.run_json()
    async with EtcdStore(state["etcd"]) as store:
        keys = await store.get_prefix(components_prefix(state["namespace"]))
    return any(key.endswith(lease) for key in keys)


def test_does_not_restart_what_left_in_order_and_ends_when_everything_has(tmp_path: Path):
    """A process does not wait for its threads. Its last lines are in the log all the same."""
    options = ("--Back.ServiceArgs.workers=2", "--Back.linger=true", "--log-format=json")
    with serving(tmp_path, *options, until="ready http") as graph:
        entry = graph.processes()["Back-0"]
        os.kill(entry["pid"], signal.SIGTERM)
        graph.wait_line("left the graph (exit 0)")
        left = graph.processes()["Back-0"]
        assert (left["state"], left["restarts"]) == ("stopped", 0)
        assert graph.processes()["Back-1"]["state"] == "ready"
        for name in ("Front-0", "Back-1"):
            os.kill(graph.processes()[name]["pid"], signal.SIGTERM)
        assert graph.end() == 0
    text = (tmp_path / "logs" / "Back-0.log").read_text()
    assert "closed Back" in text
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    [drain] = [line for line in lines if line["message"].startswith("draining")]
    assert (drain["component"], drain["instance"], drain["level"]) == ("Back", 0, "INFO")
    assert (drain["lease"], drain["pid"]) == (entry["lease"], entry["pid"])


def test_a_second_signal_forces(tmp_path: Path):
    release = tmp_path / "never"
    with serving(tmp_path / "state", f"--Front.release={release}", until="ready http") as graph:
        graph.processes()
        graph.signal(signal.SIGINT)
        graph.wait_line("draining")
        assert graph.end(signal.SIGTERM) == 130


def test_a_terminal_that_is_closed_cuts_no_drain_short(tmp_path: Path):
    """Its hangup is a stop signal, and each line that is printed after it fails."""
    release = tmp_path / "release"
    arguments = ["serve", STUB, "--state-dir", str(tmp_path), f"--Front.release={release}"]
    terminal, ours = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "dynamo_lite.cli.cli", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=ours,
        stderr=ours,
        start_new_session=True,
    )
    os.close(ours)
    try:
        seen = b""
        while b"ready http" not in seen:
            seen += os.read(terminal, 4096)
        os.close(terminal)
        process.send_signal(signal.SIGHUP)
        log = tmp_path / "logs" / "Front-0.log"
        eventually(lambda: "drain began" in log.read_text(), "the drain begins")
        release.touch()
        assert process.wait(PATIENCE_S) == 0
        assert "closed Front" in log.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("how", ["start", "crash"])
@pytest.mark.parametrize("where", ["files", "stderr"])
def test_a_failed_start_ends_everything(tmp_path: Path, how: str, where: str):
    with serving(tmp_path, f"--Back.fail={how}", "--log-to", where) as graph:
        assert graph.end() == 1
        text = graph.output
    why = "told to fail" if how == "start" else "ended before it was ready (signal 9); most likely"
    assert f"error: Back-0: {why}" in text and "Traceback" not in text
    assert ("its log is above" in text) is (where == "stderr")
    assert where == "files" or not list((tmp_path / "logs").iterdir())
    if how == "start":
        assert text.index("the last line of the log") < text.index("error: Back-0:")
    assert not (tmp_path / "run.json").exists()
