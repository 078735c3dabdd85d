"""NATS as other people run it: TLS, client certificates, users, tokens, several servers."""

import asyncio
import gc
from pathlib import Path

import pytest
import uvloop

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.queue.base import QueueConfig
from dynamo_lite.queue.jetstream import JetStreamQueue
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from tests.external import LOGIN, USERS, Certificates, nats, nats_tls, nats_url

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


async def use_broker(url: str) -> None:
    """Requests, and jobs."""

    async def echo(payload: bytes) -> bytes:
        return payload

    queue = JetStreamQueue(url, stream="jobs", subject="jobs.all", config=QueueConfig())
    async with asyncio.timeout(20), NatsMessaging(url) as messaging, queue:
        async with messaging.serve("echo", echo):
            assert await messaging.request("echo", b"hello", timeout_s=5) == b"hello"
        await queue.push(b"job", message_id="1")
        job = await queue.pull(timeout_s=5)
        assert job is not None
        assert job.payload == b"job"
        await job.ack()


async def refusal(opening: NatsMessaging) -> str:
    """What is said when it cannot be entered, which must be soon."""
    with pytest.raises(StartupError) as failure:
        async with asyncio.timeout(5):
            await opening.__aenter__()
    said = str(failure.value)
    del failure  # its traceback has the client
    gc.collect()  # reports what was left open as a ResourceWarning
    assert "s3cret" not in said
    assert ".pem" not in said
    return said


async def test_nats_over_tls(tmp_path: Path, certificates: Certificates) -> None:
    async with nats(tmp_path, nats_tls(certificates)) as server:
        await use_broker(nats_url(server, certificates.query()))
        said = await refusal(NatsMessaging(nats_url(server, certificates.query(ca="stranger"))))
        assert said == (
            f"cannot use NATS at tls://localhost:{server.port}: "
            "its certificate is not trusted; name its authority: ?ca=FILE"
        )


async def test_tls_works_in_the_loop_of_the_children(
    tmp_path: Path, certificates: Certificates
) -> None:
    async with nats(tmp_path, nats_tls(certificates) + USERS) as server:
        url = nats_url(server, certificates.query(), LOGIN)
        await asyncio.to_thread(uvloop.run, use_broker(url))


async def test_nats_with_a_certificate_for_another_name(
    tmp_path: Path, certificates: Certificates
) -> None:
    async with nats(tmp_path, nats_tls(certificates, certificate="misnamed")) as server:
        said = await refusal(NatsMessaging(nats_url(server, certificates.query())))
        assert "its certificate is for another name" in said


async def test_nats_asks_for_a_certificate_and_a_password(
    tmp_path: Path, certificates: Certificates
) -> None:
    async with nats(tmp_path, nats_tls(certificates, demand=True) + USERS) as server:
        query = certificates.query(client=True)
        await use_broker(nats_url(server, query, LOGIN))
        said = await refusal(NatsMessaging(nats_url(server, certificates.query(), LOGIN)))
        assert "it requires a client certificate: ?cert=FILE&key=FILE" in said
        for login in ("me:wrong-s3cret", "s3cret-token", ""):
            said = await refusal(NatsMessaging(nats_url(server, query, login)))
            assert "it refuses the user name, password or token" in said


async def test_nats_knows_a_user_by_the_certificate(
    tmp_path: Path, certificates: Certificates
) -> None:
    mapped = nats_tls(certificates, demand=True).replace("verify:", "verify_and_map:")
    async with nats(tmp_path, mapped + "authorization { users: [{ user: me }] }\n") as server:
        await use_broker(nats_url(server, certificates.query(client=True)))


async def test_nats_asks_for_a_token(tmp_path: Path) -> None:
    async with nats(tmp_path, 'authorization { token: "s3cret/token" }\n') as server:
        await use_broker(f"nats://s3cret%2Ftoken@127.0.0.1:{server.port}")
        said = await refusal(NatsMessaging(f"nats://s3cret@127.0.0.1:{server.port}"))
        assert "it refuses the user name, password or token" in said


async def test_no_password_goes_to_a_server_without_tls(
    tmp_path: Path, certificates: Certificates
) -> None:
    async with nats(tmp_path, USERS) as server:
        said = await refusal(NatsMessaging(nats_url(server, certificates.query(), LOGIN)))
        assert "it does not offer TLS" in said


async def test_one_of_several_servers_is_enough(tmp_path: Path, certificates: Certificates) -> None:
    async with (
        nats(tmp_path / "a", nats_tls(certificates) + USERS) as good,
        nats(tmp_path / "b", nats_tls(certificates, certificate="misnamed") + USERS) as bad,
    ):
        hosts = f"127.0.0.1:1,localhost:{bad.port},localhost:{good.port}"
        await use_broker(f"tls://{LOGIN}@{hosts}{certificates.query()}")
