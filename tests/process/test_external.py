"""`dynamo-lite` on servers of other people: nothing secret is shown, every refusal is one line."""

import os
import re
import stat
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.external import LOGIN, USERS, Certificates, etcd, etcd_url, nats, nats_tls, nats_url
from tests.process.command import invoke, revoke_lease, serving

pytestmark = pytest.mark.heavy

_NAMESPACE = ("--namespace", "n")  # where etcd's user may write


@dataclass(frozen=True)
class Urls:
    nats: str
    etcd: str

    @property
    def environment(self) -> dict[str, str]:
        """They have passwords, which no command line may have."""
        urls = {"DYNAMO_LITE_NATS_URL": self.nats, "DYNAMO_LITE_ETCD_URL": self.etcd}
        return {**os.environ, **urls}


@pytest.fixture
async def urls(tmp_path: Path, certificates: Certificates) -> AsyncIterator[Urls]:
    query = certificates.query(client=True)
    async with (
        nats(tmp_path / "nats", nats_tls(certificates, demand=True) + USERS) as broker,
        etcd(tmp_path / "etcd", certificates, demand=True, users=True) as store,
    ):
        yield Urls(nats_url(broker, query, LOGIN), etcd_url(store, query, LOGIN))


def shows_secrets(text: str) -> bool:
    return "s3cret" in text or ".pem" in text or "me:" in text


async def test_a_graph_on_external_servers(tmp_path: Path, urls: Urls) -> None:
    state_dir = tmp_path / "state"
    with serving(state_dir, *_NAMESPACE, env=urls.environment) as command:
        shown = command.wait_line("NATS tls://localhost:")
        assert re.search(r"NATS tls://localhost:\d+, etcd https://127\.0\.0\.1:\d+$", shown.strip())
        command.wait_line("ready ")
        assert command.run_json()["etcd"] == urls.etcd
        for private in (state_dir / "run.json", *(state_dir / "plans").iterdir()):
            assert stat.S_IMODE(private.stat().st_mode) == 0o600
        listing = invoke("ps", "--state-dir", str(state_dir), "--json")
        assert listing.returncode == 0, listing.stderr
        assert '"component"' in listing.stdout
        assert not shows_secrets(listing.stdout + listing.stderr)
    assert not shows_secrets(command.output)
    for log in (state_dir / "logs").iterdir():
        assert not shows_secrets(log.read_text())


def test_the_script_takes_no_password_on_the_command_line(tmp_path: Path) -> None:
    state = ("--state-dir", str(tmp_path / "state"))
    url = "http://me:s3cret@127.0.0.1:1"
    result = revoke_lease(*state, "--etcd-url", url)
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert "?login=FILE" in line and "DYNAMO_LITE_ETCD_URL" in line
    assert not shows_secrets(result.stdout + result.stderr)
    assert not (tmp_path / "state").exists()
