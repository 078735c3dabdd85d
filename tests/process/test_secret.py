"""`dynamo-lite serve` and the secret of its graph."""

import asyncio
from pathlib import Path

import pytest

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.decisions import Explained
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.nats.open import open_messaging
from dynamo_lite.serve.run_state import read_run
from tests.builders import graph_secret
from tests.process.command import STUB, invoke, run, serving

WITH_OTHERS = "has a secret, and messages without it are dropped"


def test_a_graph_has_a_secret_that_joining_services_need(tmp_path: Path):
    with serving(tmp_path / "graph", until="ready http"):
        state = read_run(tmp_path / "graph")
        assert state is not None
        secret = Path(state.secret)
        assert secret.stat().st_mode & 0o777 == 0o600 and secret.is_absolute()
        servers = ["--nats-url", state.nats, "--etcd-url", state.etcd]
        joining = ["serve", STUB, "--service-name", "Back", *servers]
        refused = run(*joining, "--state-dir", str(tmp_path / "other"))
        assert refused.returncode == 1 and WITH_OTHERS in refused.stderr, refused.stderr
        assert "--secret-file" in refused.stderr
        options = ["--service-name", "Back", *servers, "--secret-file", str(secret)]
        with serving(tmp_path / "other", *options, until="ready"):
            pass
        with serving(tmp_path / "graph", "--service-name", "Back", until="ready"):
            pass


def test_bad_secrets_and_open_addresses_are_refused(tmp_path: Path, etcd_url: str, namespace: str):
    state = ["--state-dir", str(tmp_path / "state"), "--namespace", namespace]
    broken = tmp_path / "broken"
    broken.write_text("secret words")
    broken.chmod(0o600)
    result = run("serve", STUB, *state, "--secret-file", str(broken))
    assert result.returncode == 1 and "64 hexadecimal" in result.stderr
    assert "secret words" not in result.stderr
    # Refused before anything is asked of that host, which need not exist.
    elsewhere = ["--nats-url", "tls://nats.invalid:4222", "--etcd-url", etcd_url]
    result = run("serve", STUB, *state, *elsewhere)
    [line] = result.stderr.splitlines()
    assert result.returncode == 2 and line.startswith("error: --nats-url: tls://nats.invalid:4222")
    assert "--secret-file FILE" in line


@pytest.mark.parametrize("known", [True, False])
async def test_commands_use_the_graphs_secret(
    tmp_path: Path, nats_url: str, etcd_url: str, namespace: str, known: bool
):
    """`explain` asks with it; without it the engines do not answer."""
    path = tmp_path / "secret"
    graph_secret(path)

    async def answer(_: bytes) -> bytes:
        return encode(Explained(engine_id="e1", lease_id=1, decisions=[]))

    async with EtcdStore(etcd_url) as store, open_messaging(nats_url, path) as messaging:
        await store.put(names.nixl_metadata_key(namespace, "e1"), b"")
        async with messaging.serve(names.explain_subject(namespace, "e1"), answer):
            options = ["--secret-file", str(path)] if known else []
            where = ["--nats-url", nats_url, "--etcd-url", etcd_url, "--namespace", namespace]
            result = await asyncio.to_thread(invoke, "explain", "--last", "3", *where, *options)
    assert result.returncode == 0, result.stderr
    assert ("e1 does not respond" in result.stderr) is not known
