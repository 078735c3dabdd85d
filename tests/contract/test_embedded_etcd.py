"""The etcd that a graph brings along answers only those who have its key."""

import asyncio
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.certificates import files_of as certificate_files
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.tls import TlsFiles
from dynamo_lite.serve.certificate_folder import make_certificates
from dynamo_lite.serve.embedded import EmbeddedEtcd
from tests.hostile import listening_ports

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


async def test_it_has_no_other_port_and_its_key_is_its_owner_s(tmp_path: Path):
    async with EmbeddedEtcd(tmp_path, private=True) as server:
        assert listening_ports(server.pid) == {server.port}
        assert tmp_path.stat().st_mode & 0o777 == 0o700
        for path in files_of(server):
            assert path.stat().st_mode & 0o777 == 0o600
