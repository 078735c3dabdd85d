"""NATS and etcd as compose starts them: real servers with the shipped files and made secrets."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_lite.disagg.queue.base import QueueConfig
from dynamo_lite.disagg.queue.jetstream import open_queue
from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import StartupError, StoreUnavailable
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from tests.builders import eventually
from tests.deploy.compose import COMPONENTS, Compose, planes
from tests.process.command import run
from tests.process.null_decode import PUSH_TIMEOUT_S

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]

NAMESPACE = "dynamo"


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    with planes(tmp_path_factory.mktemp("compose")) as made:
        yield made


def _parts(url: str) -> tuple[str, dict[str, str]]:
    """The servers; what is behind the `?`, by name, each as it is written."""
    servers, _, query = url.partition("?")
    return servers, {part.partition("=")[0]: part for part in query.split("&")}


def _with(servers: str, *parts: str) -> str:
    return f"{servers}?{'&'.join(parts)}" if parts else servers


async def test_strangers_get_nothing(compose: Compose) -> None:
    """Without TLS, without a login, with a wrong one, without a certificate."""
    nats, of_nats = _parts(compose.nats_url("frontend"))
    etcd, of_etcd = _parts(compose.etcd_url("frontend"))
    own = [of_nats[name] for name in ("ca", "cert", "key")]
    wrong = compose.folder / "wrong"
    wrong.write_text("dynamo-Frontend:guessed\n")
    wrong.chmod(0o600)
    for url in (
        nats.replace("tls://", "nats://"),
        nats,
        _with(nats, of_nats["ca"], of_nats["login"]),
        _with(nats, *own),
        _with(nats, *own, f"login={wrong}"),
    ):
        with pytest.raises(StartupError):
            async with asyncio.timeout(20), NatsMessaging(url, connect_timeout_s=2):
                pass
    for url in (
        etcd.replace("https://", "http://"),
        etcd,
        _with(etcd, of_etcd["ca"]),
        _with(etcd, of_etcd["ca"], of_etcd["login"]),
        _with(etcd, *own, f"login={wrong}"),
    ):
        with pytest.raises(StartupError):
            async with asyncio.timeout(20), EtcdStore(url, connect_timeout_s=2):
                pass


async def test_a_certificate_alone_gives_no_rights(compose: Compose) -> None:
    etcd, parts = _parts(compose.etcd_url("frontend"))
    url = _with(etcd, *(parts[name] for name in ("ca", "cert", "key")))
    async with EtcdStore(url, connect_timeout_s=5) as store:
        with pytest.raises(StoreUnavailable, match=r"permission denied|user name is empty"):
            await store.get(names.components_prefix(NAMESPACE))


async def test_each_service_has_its_own_rights(compose: Compose) -> None:
    own = {
        "frontend": names.endpoint_key(NAMESPACE, "Frontend", "x", 0x1A),
        "decode": names.nixl_metadata_key(NAMESPACE, "e1"),
        "prefill": names.link_key(NAMESPACE, 0x1A, "e1"),
        "operator": names.live_options_key(NAMESPACE, "VllmWorker"),
    }
    for name in COMPONENTS:
        async with EtcdStore(compose.etcd_url(name)) as store:
            for whose, key in own.items():
                if name in (whose, "operator"):
                    await store.put(key, b"{}")
                    await store.delete(key)
                    continue
                with pytest.raises(StoreUnavailable, match="permission denied"):
                    await store.put(key, b"{}")


async def test_a_job_goes_through_the_queue_and_only_where_it_may(compose: Compose) -> None:
    config = QueueConfig(push_timeout_s=PUSH_TIMEOUT_S)
    decode, prefill = (
        open_queue(compose.nats_url(name), NAMESPACE, config) for name in ("decode", "prefill")
    )
    log = compose.container("nats").root / "nats-server.log"
    async with asyncio.timeout(30), decode, prefill:
        await decode.push(b"one", message_id="1")
        job = await prefill.pull(timeout_s=10)
        assert job is not None and job.payload == b"one"
        await job.ack()

        async def empty() -> bool:
            return (await decode.depth()).jobs == 0

        await eventually(empty)
    assert "Violation" not in log.read_text()
    jobs = names.prefill_jobs_subject(NAMESPACE)
    for name in ("frontend", "prefill", "operator"):
        async with NatsMessaging(compose.nats_url(name)) as messaging:
            await messaging.client.publish(jobs, b"x")
            await messaging.client.flush()
        user = f"{NAMESPACE}-{COMPONENTS[name]}"

        def refused(user: str = user) -> bool:
            lines = log.read_text().splitlines()
            return any(f'"{jobs}"' in line and user in line for line in lines)

        await eventually(refused)


def test_a_login_that_is_missing_is_named(compose: Compose, tmp_path: Path) -> None:
    command = compose.command("etcd-users")
    folder = f"--make={tmp_path}"
    done = run(*[folder if word.startswith("--make=") else word for word in command])
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert f"{tmp_path}/root cannot be read" in line
