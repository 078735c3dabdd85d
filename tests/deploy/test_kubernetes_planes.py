"""NATS and etcd as the manifests start them: three of each, with the shipped files and secrets."""

import asyncio
import ssl
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from dynamo_lite.disagg.queue.base import QueueConfig, QueueOptions
from dynamo_lite.disagg.queue.jetstream import JetStreamQueue
from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.serve.config import resolve
from dynamo_lite.serve.document import read_document
from dynamo_lite.serve.graphs import load_graph
from tests.deploy.kubernetes import KUBERNETES, Cluster, of_kind, planes, secret_folder
from tests.deploy.kustomize import Resource, build

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]

NAMESPACE = "dynamo"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with planes(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture(scope="module")
def urls(cluster: Cluster) -> dict[str, dict[str, str]]:
    """The variables of each Deployment."""
    return {
        deployment["metadata"]["name"]: cluster.environment(deployment)
        for deployment in deployments()
    }


def deployments() -> list[Resource]:
    return of_kind(build(KUBERNETES / "overlays" / "gpu"), "Deployment")


def shipped_queue(overlay: str) -> QueueOptions:
    """That of an overlay's configuration."""
    document = read_document(KUBERNETES / "overlays" / overlay / "graph.yaml", [])
    config = resolve(load_graph("graphs.disagg:Frontend"), document)
    document.raise_mistakes()
    return QueueOptions(**next(c.options["queue"] for c in config.services if "queue" in c.options))


@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
async def test_the_queue_is_in_files_of_three_servers(
    urls: dict[str, dict[str, str]], overlay: str
) -> None:
    options = shipped_queue(overlay)
    assert (options.replicas, options.storage) == (3, "file")
    config = replace(QueueConfig.of(options), push_timeout_s=10.0)
    decode, prefill = (
        JetStreamQueue(urls[name]["DYNAMO_LITE_NATS_URL"], NAMESPACE, config)
        for name in ("decode", "prefill")
    )
    async with asyncio.timeout(90), decode, prefill:
        await decode.push(b"one", message_id=f"{overlay}-1")
        job = await prefill.pull(timeout_s=10)
        assert job is not None and job.payload == b"one"
        await job.ack()
    async with NatsMessaging(urls["decode"]["DYNAMO_LITE_NATS_URL"]) as messaging:
        stream = names.prefill_stream(NAMESPACE)
        info = await messaging.client.jetstream().stream_info(stream)
    assert info.config.num_replicas == 3 and info.config.storage == "file"
    assert info.cluster is not None and len(info.cluster.replicas or ()) == 2


async def test_every_service_reaches_etcd_as_itself(urls: dict[str, dict[str, str]]) -> None:
    """What each user may do there: tests/contract/test_least_rights.py."""
    own = {
        "frontend": names.endpoint_key(NAMESPACE, "Frontend", "x", 0x1A),
        "decode": names.nixl_metadata_key(NAMESPACE, "e1"),
        "prefill": names.link_key(NAMESPACE, 0x1A, "e1"),
    }
    assert set(urls) == set(own)
    for name, key in own.items():
        async with EtcdStore(urls[name]["DYNAMO_LITE_ETCD_URL"]) as store:
            await store.put(key, b"{}")


async def test_no_member_answers_a_stranger(
    cluster: Cluster, urls: dict[str, dict[str, str]]
) -> None:
    etcd = urls["frontend"]["DYNAMO_LITE_ETCD_URL"]
    _, _, query = etcd.partition("?")
    for number in range(3):
        address = cluster.addresses[f"etcd-{number}.etcd:2379"]
        ca = next(part for part in query.split("&") if part.startswith("ca="))
        for url in (f"http://{address}", f"https://{address}?{ca}"):
            with pytest.raises(StartupError):
                async with asyncio.timeout(20), EtcdStore(url, connect_timeout_s=2):
                    pass
    nats = urls["frontend"]["DYNAMO_LITE_NATS_URL"]
    server, _, query = nats.partition("?")
    ca, login = (next(p for p in query.split("&") if p.startswith(n)) for n in ("ca=", "login="))
    certified = "&".join(part for part in query.split("&") if part != login)
    # Without a certificate, and without a login.
    for url in (f"{server}?{ca}&{login}", f"{server}?{certified}"):
        with pytest.raises(StartupError):
            async with asyncio.timeout(20), NatsMessaging(url, connect_timeout_s=2):
                pass


def shows(cluster: Cluster, secret: str, name: str) -> ssl.SSLContext:
    """Of a client with the certificate of this name in a Secret."""
    folder = secret_folder(cluster.secrets, secret)
    context = ssl.create_default_context(cafile=cluster.secrets / "ca.pem")
    key = "tls.key" if name == "tls.crt" else name.replace(".pem", "-key.pem")
    context.load_cert_chain(folder / name, folder / key)
    return context


def peer_answer(cluster: Cluster, context: ssl.SSLContext) -> int:
    """The status of a member's port for members."""
    url = f"https://{cluster.addresses['etcd-1.etcd:2380']}/version"
    return httpx.get(url, verify=context, timeout=10).status_code


def test_only_members_reach_the_port_for_members(cluster: Cluster) -> None:
    assert peer_answer(cluster, shows(cluster, "etcd-tls", "tls.crt")) == 200
    for context in strangers(cluster):
        with pytest.raises(httpx.HTTPError):
            peer_answer(cluster, context)


def strangers(cluster: Cluster) -> list[ssl.SSLContext]:
    """Components, whose certificates are of the same authority."""
    return [
        shows(cluster, "dynamo-lite-operator", "Operator.pem"),
        shows(cluster, "dynamo-lite-vllmworker", "VllmWorker.pem"),
    ]


async def route_answer(cluster: Cluster, context: ssl.SSLContext) -> bytes:
    """What a server says on its port for servers to one that joins, up to its PONG or its end."""
    host, _, port = cluster.addresses["nats-1.nats-headless:6222"].partition(":")
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(
            host, int(port), ssl=context, server_hostname="nats-1.nats-headless"
        )
        said = b""
        try:
            writer.write(
                b'CONNECT {"name":"another","cluster":"nats","tls_required":true}\r\nPING\r\n'
            )
            while b"PONG" not in said and (line := await reader.readline()):
                said += line
        except OSError:
            pass
        finally:
            writer.close()
        return said


async def test_only_servers_reach_the_port_for_servers(cluster: Cluster) -> None:
    server = shows(cluster, "nats-tls", "tls.crt")
    assert b"PONG" in await route_answer(cluster, server)
    for context in strangers(cluster):
        said = await route_answer(cluster, context)
        assert b"Authorization Violation" in said and b"PONG" not in said
