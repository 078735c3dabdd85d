"""What the supervisor does about the lease of a process that died, on a real etcd."""

import asyncio
import shutil
import socket
import time
from pathlib import Path

import pytest

from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.store import Delete, LeaseLoss, Snapshot
from dynamo_lite.serve.embedded import EmbeddedEtcd
from dynamo_lite.serve.lease_revoker import LeaseRevoker
from tests.external import Certificates, etcd
from tests.external import etcd_url as etcd_url_of
from tests.servers import private_server

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


async def test_everyone_sees_at_once_that_the_keys_are_gone(etcd_url: str, namespace: str):
    async with EtcdStore(etcd_url) as store, store.lease(60.0) as lease:
        key = f"{namespace}/k"
        await store.put(key, b"v", lease=lease)
        async with asyncio.timeout(10), store.watch(key) as events:
            assert await anext(events) == Snapshot({key: b"v"})
            assert await LeaseRevoker(etcd_url).revoke(lease.id)
            assert await anext(events) == Delete(key)
            assert await lease.verify() is LeaseLoss.REVOKED


async def test_a_lease_that_is_gone_is_no_trouble(etcd_url: str, caplog: pytest.LogCaptureFixture):
    assert await LeaseRevoker(etcd_url).revoke(0x1234)
    assert caplog.messages == []


async def test_a_refused_login_is_logged_without_the_password(
    tmp_path: Path, certificates: Certificates, caplog: pytest.LogCaptureFixture
):
    async with etcd(tmp_path, certificates, users=True) as server:
        url = etcd_url_of(server, certificates.query(), "me:wrong-s3cret")
        assert not await LeaseRevoker(url).revoke(0x1234)
        (message,) = caplog.messages
        assert message.startswith("lease 1234 was not revoked, it will expire: 127.0.0.1:")
        assert "/v3/auth/authenticate: status 400" in message and "s3cret" not in message


async def test_a_member_that_is_away_is_passed_over(etcd_url: str):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    async with EtcdStore(etcd_url) as store, store.lease(60.0) as lease:
        await store.put("n/own", b"1", lease=lease)
        both = f"http://127.0.0.1:{port},{etcd_url.removeprefix('http://')}"
        assert await LeaseRevoker(both).revoke(lease.id)
        assert await lease.verify() is LeaseLoss.REVOKED


@pytest.mark.parametrize("answer", [b"{}", b'{"token": 1}', b"[]"])
async def test_an_answer_that_is_not_of_etcd(answer: bytes, caplog: pytest.LogCaptureFixture):
    """As of a proxy in its place."""

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(answer)
        writer.write(head + answer)
        writer.close()

    async with await asyncio.start_server(reply, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert not await LeaseRevoker(f"http://me:s3cret@127.0.0.1:{port}").revoke(0x1234)
    (message,) = caplog.messages
    assert message.startswith(f"lease 1234 was not revoked, it will expire: 127.0.0.1:{port}: /v3/")
    assert "s3cret" not in message


async def test_files_that_are_gone(
    tmp_path: Path, certificates: Certificates, caplog: pytest.LogCaptureFixture
):
    """The supervisor must outlive this: a certificate may be in the middle of its replacement."""
    authority = tmp_path / "ca.pem"
    shutil.copy(certificates.folder / "ca.pem", authority)
    revoker = LeaseRevoker(f"https://127.0.0.1:1?ca={authority}")
    authority.unlink()
    assert not await revoker.revoke(0x1234)
    assert f"ca={authority} cannot be read" in caplog.text


async def test_an_etcd_that_stands_still_delays_the_restart_for_one_timeout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async with private_server(EmbeddedEtcd, tmp_path) as server:
        server.freeze()
        began = time.monotonic()
        assert not await LeaseRevoker(server.url, timeout_s=0.2).revoke(1)
        assert time.monotonic() - began < 5
        assert "timed out" in caplog.text
