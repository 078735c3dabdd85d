"""What the supervisor does about the lease of a process that died, on a real etcd."""

import shutil
import socket
import time
from pathlib import Path

import pytest

from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.store import LeaseLoss
from dynamo_lite.serve.embedded import EmbeddedEtcd
from dynamo_lite.serve.instance_supervisor import revoke_lease
from tests.external import Certificates, etcd
from tests.external import etcd_url as etcd_url_of
from tests.servers import private_server

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


async def test_a_refused_login_is_logged_without_the_password(
    tmp_path: Path, certificates: Certificates, caplog: pytest.LogCaptureFixture
):
    async with etcd(tmp_path, certificates, users=True) as server:
        url = etcd_url_of(server, certificates.query(), "me:wrong-s3cret")
        await revoke_lease(url, 0x1234)
        (message,) = caplog.messages
        said = "lease 1234 was not revoked, it will expire: `etcdctl lease revoke` failed: "
        assert message.startswith(said)
        assert "authentication failed" in message and "s3cret" not in message


async def test_a_member_that_is_away_is_passed_over(etcd_url: str):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    async with EtcdStore(etcd_url) as store, store.lease(60.0) as lease:
        await store.put("n/own", b"1", lease=lease)
        both = f"http://127.0.0.1:{port},{etcd_url.removeprefix('http://')}"
        await revoke_lease(both, lease.id)
        assert await lease.verify() is LeaseLoss.REVOKED


async def test_files_that_are_gone(
    tmp_path: Path, certificates: Certificates, caplog: pytest.LogCaptureFixture
):
    """The supervisor must outlive this: a certificate may be in the middle of its replacement."""
    authority = tmp_path / "ca.pem"
    shutil.copy(certificates.folder / "ca.pem", authority)
    authority.unlink()
    await revoke_lease(f"https://127.0.0.1:1?ca={authority}", 0x1234)
    assert "lease 1234 was not revoked" in caplog.text and str(authority) in caplog.text


async def test_an_etcd_that_stands_still_delays_the_restart_for_one_timeout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async with private_server(EmbeddedEtcd, tmp_path) as server:
        server.freeze()
        began = time.monotonic()
        await revoke_lease(server.url, 1)
        assert time.monotonic() - began < 5
        assert "deadline exceeded" in caplog.text or "timeout after" in caplog.text
