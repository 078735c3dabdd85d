"""A real nats-server and etcd over mutual TLS, with the certificates of a graph's folder."""

import asyncio
import shutil
from pathlib import Path

import msgspec
import pytest

from dynamo_lite.protocol.codec import WIRE_VERSION
from dynamo_lite.protocol.errors import StartupError, StoreUnavailable, Unavailable
from dynamo_lite.protocol.versions import misfit
from dynamo_lite.runtime.certificates import with_files
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.runtime.process.component import ProcessSpec
from dynamo_lite.runtime.store import LeaseLoss
from dynamo_lite.serve.access import check_access
from dynamo_lite.serve.certificate_folder import make_certificates
from dynamo_lite.serve.instance_supervisor import revoke_lease
from tests.builders import endpoint_record, eventually, register
from tests.certificate_folders import graph_folder
from tests.external import (
    LOGIN,
    USERS,
    Certificates,
    TlsEtcd,
    TlsNats,
    etcd,
    etcd_url,
    nats,
    nats_tls,
    nats_url,
)
from tests.twins.servers import MemoryStore

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = graph_folder(tmp_path / "certificates")
    make_certificates(made, "n", ["client"])  # of the test's own etcdctl
    return made


def nats_config(folder: Path, *, users: bool = True) -> str:
    tls = nats_tls(Certificates(folder), certificate="nats-server", demand=True)
    return tls + (USERS if users else "")


async def use_nats(url: str, login: str = LOGIN) -> None:
    async def echo(payload: bytes) -> bytes:
        return payload

    async with NatsMessaging(url, connect_timeout_s=2.0) as messaging:
        async with messaging.serve("echo", echo):
            assert await messaging.request("echo", b"hello", timeout_s=5) == b"hello"


async def use_etcd(url: str) -> None:
    async with EtcdStore(url, connect_timeout_s=2.0) as store, store.lease(60.0) as lease:
        await store.put("n/k", b"v", lease=lease)
        assert await store.get("n/k") == b"v"
        await revoke_lease(url, lease.id)
        assert await lease.verify() is LeaseLoss.REVOKED


async def test_every_component_reaches_both_with_its_own_certificate(folder: Path, tmp_path: Path):
    async with (
        nats(tmp_path / "nats", nats_config(folder)) as broker,
        etcd(
            tmp_path / "etcd",
            Certificates(folder),
            certificate="etcd-server",
            demand=True,
            users=True,
        ) as keys,
    ):
        for name in ("Frontend", "VllmWorker", "PrefillWorker", "Planner", "Operator"):
            await use_nats(with_files(nats_url(broker, "", LOGIN), folder, name))
            await use_etcd(with_files(etcd_url(keys, "", LOGIN), folder, name))


async def test_who_has_no_certificate_of_the_graph_gets_nowhere(folder: Path, tmp_path: Path):
    other = graph_folder(tmp_path / "other")
    both = tmp_path / "both"
    shutil.copytree(other, both)
    (both / "ca.pem").write_bytes((folder / "ca.pem").read_bytes())
    async with (
        nats(tmp_path / "nats", nats_config(folder)) as broker,
        etcd(
            tmp_path / "etcd", Certificates(folder), certificate="etcd-server", demand=True
        ) as keys,
    ):
        for urls, use in (
            ((nats_url(broker, "", LOGIN), f"nats://{LOGIN}@localhost:{broker.port}"), use_nats),
            ((etcd_url(keys, ""), f"http://127.0.0.1:{keys.port}"), use_etcd),
        ):
            encrypted, plain = urls
            for url in (
                plain,
                # Without a certificate; of another graph, which trusts this one's, or does not.
                f"{encrypted}?ca={folder}/ca.pem",
                with_files(encrypted, other, "Frontend"),
                with_files(encrypted, both, "Frontend"),
            ):
                with pytest.raises(StartupError) as refused:
                    await use(url)
                assert "s3cret" not in str(refused.value) and ".pem" not in str(refused.value)


def spec(nats: str, namespace: str = "n") -> ProcessSpec:
    return ProcessSpec(
        namespace=namespace,
        component="Frontend",
        instance=0,
        nats_url=nats,
        etcd_url="",
        state_dir="",
    )


async def test_a_server_that_lets_in_everybody_is_reported(folder: Path, tmp_path: Path):
    """On the address of another host; on loopback it is not."""
    async with nats(tmp_path / "nats", nats_config(folder, users=False)) as broker:
        url = with_files(nats_url(broker, ""), folder, "Frontend")
        async with NatsMessaging(url) as messaging:
            assert not messaging.asks_who
            await check_access(spec(url), MemoryStore(), messaging)
            elsewhere = spec("tls://node-1:4222")
            with pytest.raises(StartupError, match="NATS at tls://node-1:4222 lets in everybody"):
                await check_access(elsewhere, MemoryStore(), messaging)
    async with nats(tmp_path / "nats", nats_config(folder)) as broker:
        url = with_files(nats_url(broker, "", LOGIN), folder, "Frontend")
        async with NatsMessaging(url) as messaging:
            assert messaging.asks_who
            await check_access(elsewhere, MemoryStore(), messaging)


async def test_a_live_member_of_another_wire_version_is_reported(etcd_url: str, namespace: str):
    """Before a process of this release starts beside it; both versions are named."""
    record = msgspec.structs.replace(
        endpoint_record(0x2A, "VllmWorker", namespace=namespace),
        version="9.0.0",
        wire_version=WIRE_VERSION + 1,
    )
    async with EtcdStore(etcd_url) as store:
        await register(store, record)
        with pytest.raises(StartupError) as refused:
            await check_access(spec("", namespace=namespace), store, NatsMessaging(""))
    assert str(refused.value) == f"cannot join namespace {namespace}: {misfit(record)}"


def replace_authority(folder: Path) -> None:
    """Of the servers, and of all clients."""
    for path in folder.glob("*.pem"):
        path.unlink()
    graph_folder(folder)
    make_certificates(folder, "n", ["client"])


async def test_running_clients_take_new_certificates_with_their_next_connection(
    folder: Path, tmp_path: Path
):
    keys, broker = TlsEtcd(tmp_path / "etcd"), TlsNats(tmp_path / "nats")
    keys.certificates, keys.certificate, keys.demand = Certificates(folder), "etcd-server", True
    broker.extra = nats_config(folder)

    async def answered(store: EtcdStore) -> bool:
        try:
            return await store.get("n/k") is None
        except (StoreUnavailable, Unavailable):
            return False

    async with asyncio.timeout(60), keys, broker:
        of_nats = with_files(nats_url(broker, "", LOGIN), folder, "VllmWorker")
        of_etcd = with_files(etcd_url(keys, ""), folder, "VllmWorker")
        async with NatsMessaging(of_nats) as messaging, EtcdStore(of_etcd) as store:
            assert await answered(store)
            async with store.lease(30.0) as lease:
                replace_authority(folder)
                await broker.restart()
                await keys.restart()
                await eventually(lambda: answered(store), 20)
                await eventually(lambda: messaging.connected, 20)
                await messaging.publish("s", b"x")
                assert await lease.verify() is None
