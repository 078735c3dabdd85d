"""What `ps` shows for a member, whether its process answers or not."""

import os
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from dynamo_lite.cli.listing import OnGraph, as_table, member_rows
from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.runtime.overview import fetch
from dynamo_lite.runtime.process.status import StatusServer
from dynamo_lite.serve.certificate_folder import make_certificates
from dynamo_lite.serve.run_state import RunState, lock, read_run, run_file
from tests.builders import endpoint_record, running_here
from tests.hostile import answering


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({"ok": True, "state": "ready"}, "ready"),
        ({"ok": False, "state": "ready", "unfit": "dtype"}, "unwell"),
        ({"ok": True, "state": "ready", "unfit": "dtype"}, "unfit"),
        ({"ok": False, "state": "draining"}, "draining"),
        ({"ok": False, "state": "starting"}, "starting"),
        ({"ok": True}, "silent"),
    ],
)
async def test_a_member_says_how_it_is(facts: dict, state: str):
    async with StatusServer(lambda: facts, CollectorRegistry()) as server:
        records = [endpoint_record(10, status_url=server.url)] * 2
        rows = await member_rows(records, None)
    assert [row["state"] for row in rows] == [state, state]
    assert f"  {state}  " in as_table(rows)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        b"",
        b"\xff\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n[]",
        b'HTTP/1.1 200 OK\r\n\r\n{"a": "\xff"}',
        b'HTTP/1.1 200 OK\r\n\r\n{"a": ' + 100_000 * b"[",
        b'HTTP/1.1 500 No\r\n\r\n{"state": "ready"}',
        b"HTTP/1.1 302 Elsewhere\r\nLocation: http://127.0.0.1:1/\r\n\r\n",
    ],
)
async def test_a_process_that_does_not_answer_is_silent(
    monkeypatch: pytest.MonkeyPatch, answer: bytes | None
):
    monkeypatch.setattr(fetch, "TIMEOUT_S", 0.2)
    async with answering(answer) as url:
        urls = (url, "", "file:///etc/passwd", "http://127.0.0.1:1", "http://[", "x")
        members = [endpoint_record(n, status_url=each) for n, each in enumerate(urls, 10)]
        rows = await member_rows(members, None)
    assert [row["state"] for row in rows] == ["silent"] * len(urls)


def test_a_host_of_workers_needs_their_certificates_only(tmp_path: Path):
    """For `scale` and `join`."""
    make_certificates(folder := tmp_path / "certificates", "n", ["VllmWorker"])
    run = RunState(
        pid=os.getpid(),
        started_at=0.0,
        graph="g",
        namespace="n",
        etcd="https://127.0.0.1:1",
        certificates=str(folder),
    )
    with running_here(tmp_path, run):
        place = OnGraph(state_dir=tmp_path).place("VllmWorker")
        certificates = place.certificates()
        assert certificates is not None and certificates.component == "VllmWorker"
        assert "VllmWorker.pem" in place.etcd_url
        with pytest.raises(ConfigError, match=r"Operator\.pem cannot be read"):
            OnGraph(state_dir=tmp_path).place().certificates()


def test_the_state_of_a_killed_supervisor_is_no_running_graph(tmp_path: Path):
    """Its pid may be another process's by now."""
    run = RunState(pid=os.getpid(), started_at=0.0, graph="g", namespace="n")
    assert read_run(tmp_path) is None
    with running_here(tmp_path, run), ExitStack() as stack:
        assert read_run(tmp_path) == run
        assert not lock(tmp_path, stack)
        assert read_run(tmp_path) == run  # who looks, or is refused, takes no lock from its holder
    assert run_file(tmp_path).exists() and read_run(tmp_path) is None
