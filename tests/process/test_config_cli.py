"""`dynamo-lite config` and `explain` as a person runs them, on real servers."""

import asyncio
import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dynamo_lite.disagg.decode.decision_log import DecisionLog
from dynamo_lite.protocol import names
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.runtime.process.status import StatusServer
from tests.builders import ManualClock, endpoint_record, graph_secret, register
from tests.process.command import PATIENCE_S, ROOT, run
from tests.unit.decode_engine import Decode, prompt

LENGTH, SIZE = "VllmWorker.max-local-prefill-length", "VllmWorker.max-prefill-queue-size"


@pytest.fixture
def place(etcd_url: str, namespace: str, tmp_path: Path) -> tuple[str, ...]:
    return ("--etcd-url", etcd_url, "--namespace", namespace, "--state-dir", str(tmp_path))


def shown(place: tuple[str, ...]) -> dict[str, Any]:
    result = run("config", "get", "--json", *place)
    assert result.returncode == 0, result.stderr
    return next(each for each in json.loads(result.stdout) if each["component"] == "VllmWorker")


def test_options_are_set_shown_and_unset(place: tuple[str, ...]):
    assert shown(place)["version"] == 0
    result = run("config", "set", f"{LENGTH}=256", f"{SIZE}=2", *place)
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert first.startswith(f"{LENGTH}: (file) -> 256  (version 1 by ")
    assert second.startswith(f"{SIZE}: (file) -> 2  (version 1 by ")
    assert run("config", "set", LENGTH, "300", *place).returncode == 0
    found = shown(place)
    assert (found["version"], found["processes"]) == (2, [])
    assert found["values"] == {"max-local-prefill-length": 300, "max-prefill-queue-size": 2}
    table = run("config", "get", LENGTH, *place).stdout.splitlines()
    assert table[1].split()[:3] == [LENGTH, "300", "?"]
    assert "version 2 by " in table[-1] and len(table) == 4
    result = run("config", "unset", LENGTH, *place)
    assert result.stdout.startswith(f"{LENGTH}: 300 -> (file)  (version 3 by ")
    assert run("config", "unset", "VllmWorker", *place).returncode == 0
    found = shown(place)
    assert (found["version"], found["values"]) == (4, {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["set", f"{LENGTH}=-1"], "expected a whole number ≥ 0 and ≤ 1,000,000,000, got -1"),
        (["set", f"{SIZE}=3", f"{LENGTH}=x"], "got 'x'"),
        (["set", "VllmWorker.max-local=3"], f"did you mean {LENGTH}?"),
        (["unset", "VllmWorker.nothing"], "unknown key"),
        (["get", "nothing"], "unknown key"),
        (["set"], "Missing argument"),
        (["set", f"{LENGTH}=5", "--dry-run"], "--dry-run: removed in 0.3.0: "),
    ],
)
def test_bad_input_is_refused_and_nothing_changes(
    place: tuple[str, ...], arguments: list[str], message: str
):
    result = run("config", *arguments, *place)
    assert result.returncode == 2
    assert message in result.stderr and not result.stdout
    assert shown(place)["version"] == 0


def test_without_a_server_it_says_so(tmp_path: Path):
    for command in (("config", "get"), ("explain", "--last", "1")):
        result = run(*command, "--state-dir", str(tmp_path))
        assert result.returncode == 1
        assert result.stderr.startswith("error: no graph runs on ")
    result = run("config", "get", "--etcd-url", "http://127.0.0.1:1", "--namespace", "n")
    assert result.returncode == 1 and "cannot use etcd" in result.stderr


async def test_what_nobody_can_read_is_named_and_replaced(
    place: tuple[str, ...], etcd_url: str, namespace: str
):
    async with EtcdStore(etcd_url) as store:
        await store.put(names.live_options_key(namespace, "VllmWorker"), b'{"values": 1}')
    for arguments in (["get"], ["set", f"{LENGTH}=1"], ["unset", LENGTH]):
        result = run("config", *arguments, *place)
        assert result.returncode == 1
        assert f"the record in etcd is invalid: {namespace}/config/VllmWorker: " in result.stderr
        assert "config unset" in result.stderr
    assert run("config", "unset", "VllmWorker", *place).returncode == 0
    assert shown(place)["version"] == 1


def test_changes_are_watched_until_ctrl_c(place: tuple[str, ...]):
    process = subprocess.Popen(
        [sys.executable, "-m", "dynamo_lite.cli.cli", "config", "watch", *place],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines: queue.Queue[str] = queue.Queue()
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: [lines.put(line) for line in process.stdout or ()])
    reader.start()
    try:
        told, value = "", 0
        while not told:  # what is set before it looks is no change
            value += 1
            assert run("config", "set", f"{LENGTH}={value}", *place).returncode == 0
            assert value < 30, "no change was told"
            try:
                told = lines.get(timeout=1.0)
            except queue.Empty:
                continue
        assert LENGTH in told and "version" in told
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        reader.join()
        errors = process.stderr.read() if process.stderr else ""
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    assert "Traceback" not in errors


async def test_who_follows_is_told(place: tuple[str, ...], etcd_url: str, namespace: str):
    file = {"max-local-prefill-length": 512}
    options = {"version": 1, "engine_version": 1, "file": file, "refused": ""}
    async with (
        StatusServer(lambda: {"ok": True, "options": options}, CollectorRegistry()) as server,
        EtcdStore(etcd_url) as store,
        store.lease(30) as lease,
    ):
        record = endpoint_record(lease.id, namespace=namespace, status_url=server.url)
        await register(store, record, lease=lease)
        for version, count in ((1, 1), (2, 0)):
            result = await run_async("config", "set", f"{LENGTH}={version}", *place)
            assert result.returncode == 0
            told = (await run_async("config", "get", *place)).stdout
            assert f"version {version} by" in told
            assert f"followed by {count} of 1 live processes" in told
            assert [line.split()[2] for line in told.splitlines() if LENGTH in line] == ["512"]


async def test_where_processes_have_a_secret_only_its_owner_changes_options(
    place: tuple[str, ...], etcd_url: str, namespace: str, tmp_path: Path
):
    path, key = tmp_path / "graph_secret", names.live_options_key(namespace, "VllmWorker")
    graph_secret(path, b"o" * 32)
    known = (*place, "--secret-file", str(path))
    options = {"version": 0, "newest": 7, "engine_version": None, "file": {}, "refused": "forged"}
    async with (
        StatusServer(lambda: {"ok": True, "options": options}, CollectorRegistry()) as server,
        EtcdStore(etcd_url) as store,
        store.lease(30) as lease,
    ):
        record = endpoint_record(
            lease.id, namespace=namespace, status_url=server.url, authenticated=True
        )
        await register(store, record, lease=lease)
        for arguments in (["set", f"{LENGTH}=5"], ["unset", "VllmWorker"]):
            refused = await run_async("config", *arguments, *place)
            assert (refused.returncode, refused.stdout) == (1, "")
            assert "this graph has a secret; name it with --secret-file" in refused.stderr
        assert await store.get(key) is None
        result = await run_async("config", "set", f"{LENGTH}=256", *known)
        assert "(file) -> 256  (version 8 by " in result.stdout, result.stderr
        data = await store.get(key)
        assert data is not None and set(json.loads(data)) == {"seal", "record"}
        told = await run_async("config", "get", LENGTH, *known)
        assert "version 8 by" in told.stdout and not told.stderr
        assert "refuses the record in etcd: forged" in told.stdout
        told = await run_async("config", "get", LENGTH, *place)
        assert "version 8 by" in told.stdout and "seals of the records were not" in told.stderr
        graph_secret(path, b"n" * 32, b"o" * 32)
        result = await run_async("config", "seal", *known)
        assert result.stdout == "sealed: VllmWorker\n", result.stderr
        graph_secret(path, b"n" * 32)
        told = await run_async("config", "get", LENGTH, *known)
        assert told.returncode == 0 and "version 9 by" in told.stdout
        await store.put(key, data)
        for arguments in (["get"], ["set", f"{LENGTH}=1"], ["seal"]):
            result = await run_async("config", *arguments, *known)
            assert result.returncode == 1 and f"{key}: not authentic" in result.stderr
        result = await run_async("config", "unset", "VllmWorker", *known)
        assert result.returncode == 0, result.stderr
    refused = await run_async("config", "set", f"{LENGTH}=5", *place)
    assert refused.returncode == 1 and "is sealed with a secret" in refused.stderr
    assert "no secret to seal with" in (await run_async("config", "seal", *place)).stderr


async def run_async(*arguments: str) -> subprocess.CompletedProcess[str]:
    """While this process serves what the command asks for."""
    return await asyncio.to_thread(run, *arguments)


@pytest.fixture
async def engine(
    place: tuple[str, ...], etcd_url: str, nats_url: str, namespace: str
) -> AsyncIterator[DecisionLog]:
    """A decode engine's decisions, at its subject; and another engine, which has died."""
    log = Decode(ManualClock()).half
    for name, tokens in (("0_cmpl-a-0-0a1b2c3d#1", 3), ("chatcmpl-b-0a1b2c3d#2", 3)):
        log.num_new_matched_tokens(prompt(name, tokens), 0)
        log.state_after_alloc(prompt(name, tokens), [], 0)

    async def answer(payload: bytes) -> bytes:
        return log.prefills.decisions.answer(payload)

    async with (
        EtcdStore(etcd_url) as store,
        NatsMessaging(nats_url) as messaging,
        messaging.serve(names.explain_subject(namespace, "e1"), answer),
    ):
        for engine_id in ("e1", "dead"):
            await store.put(names.nixl_metadata_key(namespace, engine_id), b"")
        yield log.prefills.decisions


async def test_a_decision_is_explained(engine: DecisionLog, place: tuple[str, ...], nats_url: str):
    where = (*place, "--nats-url", nats_url)
    result = await run_async("explain", "cmpl-a", *where)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("0_cmpl-a-0-0a1b2c3d#1 ")
    assert "  verdict  local, short: 3 tokens to compute, at most 4 are local" in result.stdout
    assert "dead does not respond" in result.stderr
    [told] = json.loads((await run_async("explain", "b", "--json", *where)).stdout)
    assert (told["request_id"], told["verdict"]) == ("chatcmpl-b-0a1b2c3d#2", "local")
    listed = (await run_async("explain", "--last", "20", *where)).stdout.splitlines()
    assert [line.split()[1] for line in listed] == [
        "REQUEST",
        "0_cmpl-a-0-0a1b2c3d#1",
        "chatcmpl-b-0a1b2c3d#2",
    ]
    assert len((await run_async("explain", "--last", "1", *where)).stdout.splitlines()) == 2
    unknown = await run_async("explain", "cmpl-unknown", *where)
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "cmpl-unknown: none of 1 decode engines has a decision of it" in unknown.stderr


@pytest.mark.parametrize(
    "arguments", [[], ["a", "--last", "1"], ["--last", "0"], ["--last", "x"], ["x" * 300]]
)
def test_bad_options_of_explain(place: tuple[str, ...], arguments: list[str]):
    result = run("explain", *arguments, *place)
    assert result.returncode == 2 and not result.stdout
