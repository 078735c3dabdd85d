"""etcd as other people run it: TLS, client certificates, users, lost tokens, several members."""

import asyncio
import contextlib
import re
import shutil
from pathlib import Path

import pytest

from dynamo_lite.protocol.errors import ConfigError, StartupError, StoreUnavailable
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.store import Put, Snapshot
from dynamo_lite.serve.embedded import EmbeddedEtcd
from dynamo_lite.serve.run_state import write_private
from tests.external import LOGIN, PASSWORD, Certificates, add_users, etcd, etcd_url
from tests.store_outages import put_when_back, refreshed_once_more

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


async def use_store(url: str) -> None:
    """Everything that a graph asks of etcd."""
    async with asyncio.timeout(20), EtcdStore(url) as store, store.watch("n/") as events:
        assert await anext(events) == Snapshot({})
        async with store.lease(5) as lease:
            await store.put("n/own", b"1", lease=lease)
            assert await anext(events) == Put("n/own", b"1")
            assert await store.create("n/one", b"1", lease=lease)
            assert await store.get("n/own") == b"1"
            assert await store.get_prefix("n/") == {"n/own": b"1", "n/one": b"1"}
            assert await lease.verify() is None
        assert await store.get_prefix("n/") == {}


async def refusal(opening: EtcdStore) -> str:
    """What is said when it cannot be entered, which must be soon."""
    with pytest.raises(StartupError) as failure:
        async with asyncio.timeout(5):
            await opening.__aenter__()
    assert "s3cret" not in str(failure.value)
    assert ".pem" not in str(failure.value)
    return str(failure.value)


async def test_etcd_over_tls(tmp_path: Path, certificates: Certificates) -> None:
    async with etcd(tmp_path, certificates) as server:
        await use_store(etcd_url(server, certificates.query()))
        url = etcd_url(server, certificates.query(ca="stranger"))
        said = await refusal(EtcdStore(url))
        assert said == (
            f"cannot use etcd at https://127.0.0.1:{server.port}: "
            "its certificate is not trusted; name its authority: ?ca=FILE"
        )
        plain = await refusal(EtcdStore(f"http://127.0.0.1:{server.port}", connect_timeout_s=0.2))
        assert "write https:// if it requires TLS" in plain


async def test_a_certificate_that_is_gone_later_is_named(
    tmp_path: Path, certificates: Certificates
) -> None:
    """As of one that is being replaced. A store that is connected goes on."""
    authority = tmp_path / "ca.pem"
    shutil.copy(certificates.folder / "ca.pem", authority)
    (tmp_path / "data").mkdir()
    async with etcd(tmp_path / "data", certificates) as server:
        url = f"https://127.0.0.1:{server.port}"
        said = f"etcd URL {url}: ca={authority} cannot be read (No such file"
        async with EtcdStore(f"{url}?ca={authority}") as store:
            second = EtcdStore(f"{url}?ca={authority}")
            authority.unlink()
            with pytest.raises(ConfigError, match=re.escape(said)):
                await second.__aenter__()
            async with store.lease(5.0) as lease:
                assert await lease.verify() is None


async def test_etcd_with_a_certificate_for_another_name_or_without_tls(
    tmp_path: Path, certificates: Certificates
) -> None:
    async with etcd(tmp_path / "a", certificates, certificate="misnamed") as server:
        said = await refusal(EtcdStore(etcd_url(server, certificates.query())))
        assert "its certificate is for another name" in said
    async with EmbeddedEtcd(tmp_path / "b") as server:
        url = f"https://127.0.0.1:{server.port}{certificates.query()}"
        said = await refusal(EtcdStore(url, connect_timeout_s=0.2))
        assert "write http:// if it has no TLS" in said


async def test_etcd_asks_for_a_certificate_and_a_password(
    tmp_path: Path, certificates: Certificates
) -> None:
    async with etcd(tmp_path, certificates, demand=True, users=True) as server:
        query = certificates.query(client=True)
        await use_store(etcd_url(server, query, LOGIN))
        await use_store(etcd_url(server, query))  # known by the certificate
        said = await refusal(EtcdStore(etcd_url(server, certificates.query(), LOGIN)))
        assert "it does not accept this client's certificate" in said
        for login in ("me:wrong-s3cret", "nobody:s3cret"):
            said = await refusal(EtcdStore(etcd_url(server, query, login)))
            assert "it refuses the user name or password" in said


async def test_etcd_wants_a_user_and_a_file_has_the_password(
    tmp_path: Path, certificates: Certificates
) -> None:
    login = tmp_path / "login"
    write_private(login, f"me:{PASSWORD}\n".encode())
    async with etcd(tmp_path, certificates, users=True) as server:
        said = await refusal(EtcdStore(etcd_url(server, certificates.query())))
        assert "it requires a user name and password" in said
        url = etcd_url(server, f"{certificates.query()}&login={login}")
        await use_store(url)
        async with EtcdStore(url) as store:
            with pytest.raises(StoreUnavailable, match="permission denied"):
                await store.put("m/foreign", b"")
        write_private(login, b"me:wrong-s3cret\n")
        assert "it refuses the user name or password" in await refusal(EtcdStore(url))


async def test_a_token_is_renewed_when_etcd_forgets_it(
    tmp_path: Path, certificates: Certificates
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(contextlib.AsyncExitStack())
        server = await running.enter_async_context(etcd(tmp_path, certificates, users=True))
        url = etcd_url(server, certificates.query(), LOGIN)
        store = await stack.enter_async_context(EtcdStore(url))
        events = await stack.enter_async_context(store.watch("n/"))
        lease = await stack.enter_async_context(store.lease(20))
        assert await anext(events) == Snapshot({})
        first = store._client.metadata
        await running.aclose()
        await running.enter_async_context(etcd(tmp_path, certificates, port=server.port))
        async with asyncio.timeout(20):
            await put_when_back(store, "n/a", b"1", lease=lease, within_s=20)
            last = await anext(events)
            while last not in (Put("n/a", b"1"), Snapshot({"n/a": b"1"})):
                last = await anext(events)
        assert store._client.metadata not in (first, None)
        assert await lease.verify() is None
        await refreshed_once_more(lease)


async def test_a_token_is_renewed_when_users_change(
    tmp_path: Path, certificates: Certificates
) -> None:
    async with etcd(tmp_path, certificates) as server:
        url = etcd_url(server, certificates.query(), LOGIN)
        # No users yet: credentials do not hurt.
        async with EtcdStore(url) as store:
            await add_users(server)
            async with asyncio.timeout(10):
                await asyncio.gather(*(store.put(f"n/{i}", b"1") for i in range(5)))
                await server.control("user", "add", "other:x", user="root", password="root")
                await asyncio.gather(*(store.put(f"n/{i}", b"2") for i in range(5)))
                assert set((await store.get_prefix("n/")).values()) == {b"2"}
