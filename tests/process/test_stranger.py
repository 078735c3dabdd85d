"""A graph as on several hosts, and a stranger who reaches each of its ports with no certificate."""

import os
import re
from pathlib import Path
from random import Random

import httpx
import pytest

from dynamo_lite.protocol.permissions import OPERATOR
from dynamo_lite.runtime.address import parse_nats_url
from dynamo_lite.runtime.certificates import Certificates
from dynamo_lite.serve.run_state import RunState, read_run
from tests.hostile import MESSAGES, listening_ports, tell
from tests.process.command import serving

pytestmark = pytest.mark.timeout(400)

WORKER = "tests.process.null_graph:Worker"


def dropped(state: RunState, where: str) -> float:
    """Asked by the operator."""
    [worker] = state.processes
    own = Certificates(Path(state.certificates), state.namespace, OPERATOR)
    page = httpx.get(f"{worker.status_url}/metrics", timeout=30, verify=own.client()).text
    name = f'dynamo_lite_dropped_messages_total{{where="{where}"}}'
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


def test_a_stranger_reads_nothing_and_ends_nothing(tmp_path: Path):
    noise = Random(7)
    with serving(tmp_path, "--Graph.bind-host=0.0.0.0", graph=WORKER) as graph:
        graph.wait_line("ready", timeout_s=200)
        state = read_run(tmp_path)
        assert state is not None
        [worker] = state.processes
        ports = {
            port
            for pid in (worker.pid, *(server.pid for server in state.servers))
            for port in listening_ports(pid)
        }
        assert len(ports) == 4, "NATS, etcd, the worker's for requests and its status server"
        heard = b""
        for port in ports:
            for tls in (False, True):
                for message in (*MESSAGES, noise.randbytes(5000)):
                    heard += tell(("127.0.0.1", port), message, tls=tls)
        assert b'"component":"VllmWorker"' in heard, "the status server tells everybody its state"
        assert b"it shows no certificate" in heard and b"dynamo_lite_" not in heard
        assert b"Authorization Violation" in heard and b"PONG" not in heard
        token = parse_nats_url(state.nats).token
        key = (Path(state.certificates) / "VllmWorker-key.pem").read_text().splitlines()[1]
        assert token
        for hidden in (token, key, '"kvs"', '"leases"', "VllmWorker/generate"):
            assert hidden.encode() not in heard
        assert dropped(state, "certificate") > 0
        again = read_run(tmp_path)
        assert again is not None
        assert [(p.pid, p.lease, p.restarts) for p in again.processes] == [
            (worker.pid, worker.lease, 0)
        ]
        assert again.servers == state.servers
        ready = httpx.get(f"{worker.status_url}/ready", timeout=30, verify=False)
        assert ready.status_code == 200
        logs = "".join(path.read_text() for path in (tmp_path / "logs").iterdir())
        shown = logs + graph.output
        assert token not in shown and key not in shown and not re.search("Traceback", logs)
    assert not os.path.exists(f"/proc/{worker.pid}")
