"""A real nats-server and etcd over mutual TLS, with the certificates of a graph's folder."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from dynamo_lite.protocol.codec import WIRE_VERSION
from dynamo_lite.protocol.errors import StoreUnavailable, Unavailable
from dynamo_lite.protocol.versions import misfit
from dynamo_lite.runtime.certificates import with_files
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.runtime.store import LeaseLoss
from dynamo_lite.serve.access import ServersToCheck, problems
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
        assert await revoke_lease(url, lease.id)
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


async def test_a_server_that_lets_in_everybody_is_reported(folder: Path, tmp_path: Path):
    """On the address of another host; on loopback it is not."""
    async with nats(tmp_path / "nats", nats_config(folder, users=False)) as broker:
        url = with_files(nats_url(broker, ""), folder, "Frontend")
        assert await problems(ServersToCheck(nats=url)) == []
        async with NatsMessaging(url) as messaging:
            assert not messaging.asks_who
    async with nats(tmp_path / "nats", nats_config(folder)) as broker:
        url = with_files(nats_url(broker, "", LOGIN), folder, "Frontend")
        async with NatsMessaging(url) as messaging:
            assert messaging.asks_who


async def test_a_live_member_of_another_wire_version_is_reported(etcd_url: str, namespace: str):
    """Before a process of this release starts beside it; both versions are named."""
    record = msgspec.structs.replace(
        endpoint_record(0x2A, "VllmWorker", namespace=namespace),
        version="9.0.0",
        wire_version=WIRE_VERSION + 1,
    )
    async with EtcdStore(etcd_url) as store:
        await register(store, record)
    [said] = await problems(ServersToCheck(etcd=etcd_url, namespace=namespace))
    assert said == f"cannot join namespace {namespace}: {misfit(record)}"


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
