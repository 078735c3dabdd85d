"""The etcd that a graph brings along answers only those who have its key."""

import asyncio
import http.client
import json
import os
import signal
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.certificates import files_of as certificate_files
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.store import LeaseLoss, Put, Snapshot
from dynamo_lite.runtime.tls import TlsFiles
from dynamo_lite.serve.certificate_folder import make_certificates
from dynamo_lite.serve.embedded import EmbeddedEtcd
from dynamo_lite.serve.lease_revoker import LeaseRevoker
from tests.hostile import listening_ports
from tests.store_outages import put_when_back

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


async def refusal(url: str) -> str:
    with pytest.raises(StartupError) as failure:
        async with asyncio.timeout(5), EtcdStore(url, connect_timeout_s=0.5):
            pass
    return str(failure.value)


def foreign_key(folder: Path) -> TlsFiles:
    """Those of an authority that looks just like the server's."""
    make_certificates(folder, "etcd", ["etcd-server"], ["127.0.0.1"], servers=True)
    return certificate_files(folder, "etcd-server")


def files_of(server: EmbeddedEtcd) -> list[Path]:
    """Authority, certificate and key, which its URL names."""
    named = parse_qs(urlsplit(server.url).query)
    return [Path(named[name][0]) for name in ("ca", "cert", "key")]


async def test_nothing_is_answered_without_the_key(tmp_path: Path):
    async with EmbeddedEtcd(tmp_path / "etcd", private=True) as server:
        async with EtcdStore(server.url) as store:
            await store.put("n/a", b"1")
            assert await store.get_prefix("n/") == {"n/a": b"1"}
        foreign = foreign_key(tmp_path)
        ca, own = files_of(server)[0], f"cert={foreign.cert}&key={foreign.key}"
        plain = await refusal(server.listening.replace("https", "http"))
        assert "write https:// if it requires TLS" in plain
        for query in (f"?ca={ca}", f"?ca={ca}&{own}"):
            assert "does not accept this client's certificate" in await refusal(
                server.listening + query
            )
        assert "not trusted" in await refusal(f"{server.listening}?ca={foreign.ca}&{own}")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v3/lease/leases", {}),
        ("/v3/lease/revoke", {"ID": "LEASE"}),
        ("/v3/kv/range", {"key": "AA==", "range_end": "AA=="}),
        ("/v3/maintenance/alarm", {"action": "ACTIVATE", "alarm": "NOSPACE"}),
        ("/v3/maintenance/snapshot", {}),
    ],
)
async def test_what_a_stranger_asks(tmp_path: Path, path: str, body: dict[str, Any]):
    """Also what etcd's own users would not prevent; with the key it is answered."""
    async with EmbeddedEtcd(tmp_path / "etcd", private=True) as server:
        own = TlsFiles(*files_of(server))
        stranger = ssl.create_default_context()
        stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
        foreign = foreign_key(tmp_path)
        assert foreign.cert is not None
        stranger.load_cert_chain(foreign.cert, foreign.key)
        async with EtcdStore(server.url) as store, store.lease(60) as lease:
            asked = json.dumps(body).replace("LEASE", str(lease.id))

            def ask(context: ssl.SSLContext) -> int:
                connection = http.client.HTTPSConnection(
                    "127.0.0.1", server.port, timeout=5, context=context
                )
                try:
                    connection.request("POST", path, asked)
                    return connection.getresponse().status
                finally:
                    connection.close()

            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.to_thread(ask, stranger)
            assert await lease.verify() is None
            await store.put("n/a", b"1", lease=lease)
            assert await asyncio.to_thread(ask, own.context()) == 200


async def test_it_has_no_other_port_and_its_key_is_its_owner_s(tmp_path: Path):
    async with EmbeddedEtcd(tmp_path, private=True) as server:
        assert listening_ports(server.pid) == {server.port}
        assert tmp_path.stat().st_mode & 0o777 == 0o700
        for path in files_of(server):
            assert path.stat().st_mode & 0o777 == 0o600


async def test_the_supervisor_revokes_leases(tmp_path: Path):
    async with EmbeddedEtcd(tmp_path / "a ü,b", private=True) as server:
        async with EtcdStore(server.url) as store, store.lease(60) as lease:
            await store.put("n/a", b"1", lease=lease)
            assert await LeaseRevoker(server.url).revoke(lease.id)
            assert await lease.verify() is LeaseLoss.REVOKED


@pytest.mark.parametrize("wiped", [False, True])
async def test_clients_go_on_after_a_restart(tmp_path: Path, wiped: bool):
    async with (
        EmbeddedEtcd(tmp_path, private=True) as server,
        EtcdStore(server.url) as store,
        store.watch("n/") as events,
        store.lease(30) as lease,
    ):
        assert await anext(events) == Snapshot({})
        await store.put("n/own", b"1", lease=lease)
        assert await anext(events) == Put("n/own", b"1")
        os.kill(server.pid, signal.SIGKILL)
        await server.exited()
        if wiped:
            (tmp_path / "data").rename(tmp_path / "gone")
        await server.restart()
        async with asyncio.timeout(20):
            await put_when_back(store, "n/new", b"2", within_s=20)
            while (event := await anext(events)) != Put("n/new", b"2"):
                assert isinstance(event, Snapshot)
                if "n/new" in event.entries:
                    break
            assert await lease.verify() is None
