"""`dynamo-lite access` of a running graph."""

import subprocess
from pathlib import Path

import pytest

from dynamo_lite.runtime.address import parse_nats_url
from dynamo_lite.serve.run_state import read_run
from tests.process.command import serving

pytestmark = pytest.mark.timeout(400)


def test_the_owner_of_a_graph_finds_the_key_of_etcd_and_the_token_of_nats(tmp_path: Path):
    with serving(tmp_path, until="ready http") as graph:
        state = read_run(tmp_path)
        assert state is not None
        assert not any("key.pem" in line for line in graph.output)
        (line,) = [line for line in graph.output if "to look into etcd: " in line]
        told = line.partition("etcd: ")[2].split()
        listed = subprocess.run(told, capture_output=True, text=True, timeout=60)
        assert "dynamo/components/Back/" in listed.stdout, listed.stderr
        login = tmp_path / "dynamo-lite-servers" / "nats" / "login"
        assert login.read_text() == parse_nats_url(state.nats).token
    assert not (tmp_path / "etcdctl").exists()
