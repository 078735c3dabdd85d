"""`dynamo-lite access` of a running graph."""

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from dynamo_lite.runtime.address import parse_nats_url
from dynamo_lite.serve.run_state import read_run
from tests.process.command import invoke, run, serving

pytestmark = pytest.mark.timeout(400)

_ETCDCTL = Path(sysconfig.get_path("scripts")) / "etcdctl"


def etcdctl(*command: str, env: str = "") -> subprocess.CompletedProcess[str]:
    """In a shell that has evaluated `env`."""
    return subprocess.run(
        ["sh", "-c", f'{env}\nexec "$0" "$@"', _ETCDCTL, *command],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_etcdctl_is_given_the_key_and_the_token_is_printed(tmp_path: Path):
    with serving(tmp_path, until="ready http") as graph:
        state = read_run(tmp_path)
        assert state is not None
        shown = run("access", "etcd", "--env", "--state-dir", str(tmp_path))
        assert shown.returncode == 0, shown.stderr
        listed = etcdctl("get", "--prefix", "dynamo", env=shown.stdout)
        assert "dynamo/components/Back/" in listed.stdout, listed.stderr
        assert not any("key.pem" in line for line in graph.output)
        (line,) = [line for line in graph.output if "to look into etcd: " in line]
        told = line.partition("etcd: ")[2].split()
        same = subprocess.run(told, capture_output=True, text=True, timeout=60)
        assert same.stdout == listed.stdout, same.stderr
        broker = invoke("access", "nats", "--env", "--state-dir", str(tmp_path))
        token = parse_nats_url(state.nats).token
        assert f"export NATS_USER={token}" in broker.stdout
    assert not (tmp_path / "etcdctl").exists()
