"""`dynamo-lite access`, and who may use the servers of a running graph."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from dynamo_lite.runtime.address import parse_nats_url
from dynamo_lite.serve.run_state import read_run
from tests.process.command import ROOT, run, serving

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


def test_etcdctl_needs_the_key_and_is_given_it(tmp_path: Path):
    with serving(tmp_path) as graph:
        graph.wait_line("ready http")
        state = read_run(tmp_path)
        assert state is not None
        endpoint = state.etcd.partition("?")[0]
        quick = ("--dial-timeout=1s", "--command-timeout=1s", "--endpoints", endpoint)
        refused = etcdctl(*quick, "--insecure-skip-tls-verify", "get", "--prefix", "dynamo")
        assert refused.returncode != 0 and "dynamo/" not in refused.stdout
        shown = run("access", "etcd", "--env", "--state-dir", str(tmp_path))
        assert shown.returncode == 0, shown.stderr
        listed = etcdctl("get", "--prefix", "dynamo", env=shown.stdout)
        assert "dynamo/components/Back/" in listed.stdout, listed.stderr
        plain = run("ps", "--etcd-url", endpoint)
        assert plain.returncode == 1 and "its certificate is not trusted" in plain.stderr
        assert not any("key.pem" in line for line in graph.output)
        broker = run("access", "nats", "--env", "--state-dir", str(tmp_path))
        token = parse_nats_url(state.nats).token
        assert f"export NATS_USER={token}" in broker.stdout
        # The script, too, finds what it needs in the state directory.
        back = next(p for p in state.processes if p.service == "Back")
        script = [sys.executable, "scripts/revoke_lease.py", "--state-dir", str(tmp_path)]
        revoked = subprocess.run(
            [*script, back.lease], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert revoked.returncode == 0, revoked.stderr
        graph.when("Back-0", lambda entry: entry["restarts"] == 1 or entry["state"] == "stopped")


def test_without_a_graph_it_says_where_to_look(tmp_path: Path):
    result = run("access", "etcd", "--env", "--state-dir", str(tmp_path))
    assert result.returncode == 1
    assert re.search("no graph runs on .*--etcd-url", result.stderr)
