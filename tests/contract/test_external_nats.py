"""NATS as other people run it: TLS, client certificates, users, tokens, several servers."""

import asyncio
import base64
import gc
import hashlib
import json
import secrets
import warnings
from pathlib import Path

import nkeys
import pytest
import uvloop

from dynamo_lite.disagg.queue.jetstream import JetStreamQueue
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.serve.run_state import write_private
from tests.builders import eventually
from tests.external import LOGIN, PASSWORD, USERS, Certificates, nats, nats_tls, nats_url

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


def jwt_account(folder: Path) -> tuple[str, Path]:
    """nats-server's configuration with an operator and one account, and a user's file."""
    operator, operator_key = _key(nkeys.PREFIX_BYTE_OPERATOR)
    account, account_key = _key(nkeys.PREFIX_BYTE_ACCOUNT)
    user, user_key = _key(nkeys.PREFIX_BYTE_USER)
    limits = {"subs": -1, "data": -1, "payload": -1}
    wide = {**limits, "conn": -1, "leaf": -1, "imports": -1, "exports": -1, "wildcards": True}
    of_operator = _jwt(operator, "O", operator_key, {"type": "operator"})
    of_account = _jwt(operator, "A", account_key, {"type": "account", "limits": wide})
    of_user = _jwt(account, "U", user_key, {"type": "user", **limits})
    creds = folder / "user.creds"
    parts = ("NATS USER JWT", of_user), ("USER NKEY SEED", user.decode())
    text = "".join(
        f"-----BEGIN {name}-----\n{part}\n------END {name}------\n\n" for name, part in parts
    )
    write_private(creds, text.encode())
    _, system_key = _key(nkeys.PREFIX_BYTE_ACCOUNT)
    of_system = _jwt(operator, "SYS", system_key, {"type": "account", "limits": wide})
    accounts = f"{account_key}: {of_account}, {system_key}: {of_system}"
    config = f"operator: {of_operator}\nsystem_account: {system_key}\n"
    return f"{config}resolver: MEMORY\nresolver_preload: {{ {accounts} }}\n", creds


def _key(kind: int) -> tuple[bytes, str]:
    """A seed and its public key."""
    seed = nkeys.encode_seed(secrets.token_bytes(32), kind)
    return seed, bytes(nkeys.from_seed(bytearray(seed)).public_key).decode()


def _jwt(issuer: bytes, name: str, subject: str, claims: dict[str, object]) -> str:
    pair = nkeys.from_seed(bytearray(issuer))
    body: dict[str, object] = {"iss": bytes(pair.public_key).decode(), "sub": subject, "name": name}
    body |= {"iat": 1, "nats": {"version": 2, **claims}}
    body["jti"] = base64.b32encode(hashlib.sha256(json.dumps(body).encode()).digest()).decode()
    parts = [_base64({"typ": "JWT", "alg": "ed25519-nkey"}), _base64(body)]
    signed = pair.sign(".".join(parts).encode())
    return ".".join([*parts, base64.urlsafe_b64encode(signed).decode().rstrip("=")])


def _base64(content: dict[str, object]) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")


async def use_broker(url: str) -> None:
    """Requests, and jobs."""

    async def echo(payload: bytes) -> bytes:
        return payload

    queue = JetStreamQueue(url, "jobs")
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
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()  # what tests before this one have left
    with pytest.raises(StartupError) as failure:
        async with asyncio.timeout(5):
            await opening.__aenter__()
    said = str(failure.value)
    del failure  # its traceback has the client
    gc.collect()  # reports what was left open as a ResourceWarning
    assert "s3cret" not in said
    assert ".pem" not in said
    return said


async def test_nats_over_tls(
    tmp_path: Path, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    async with nats(tmp_path / "a", nats_tls(certificates)) as server:
        await use_broker(nats_url(server, certificates.query()))
        said = await refusal(NatsMessaging(nats_url(server, certificates.query(ca="stranger"))))
        assert said == (
            f"cannot use NATS at tls://localhost:{server.port}: "
            "its certificate is not trusted; name its authority: ?ca=FILE"
        )
    async with nats(tmp_path / "b", nats_tls(certificates, certificate="misnamed")) as server:
        said = await refusal(NatsMessaging(nats_url(server, certificates.query())))
        assert "its certificate is for another name" in said
    assert caplog.messages == []


async def test_tls_works_in_the_loop_of_the_children(
    tmp_path: Path, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    async with nats(tmp_path, nats_tls(certificates) + USERS) as server:
        url = nats_url(server, certificates.query(), LOGIN)
        await asyncio.to_thread(uvloop.run, use_broker(url))
    assert caplog.messages == []


async def test_nats_asks_for_a_certificate_and_a_password(
    tmp_path: Path, certificates: Certificates
) -> None:
    async with nats(tmp_path, nats_tls(certificates, demand=True) + USERS) as server:
        query = certificates.query(client=True)
        await use_broker(nats_url(server, query, LOGIN))
        said = await refusal(NatsMessaging(nats_url(server, certificates.query(), LOGIN)))
        assert "it requires a client certificate: ?cert=FILE&key=FILE" in said
        await refusal(NatsMessaging(f"nats://{LOGIN}@localhost:{server.port}"))
        for login in ("me:wrong-s3cret", "s3cret-token", ""):
            said = await refusal(NatsMessaging(nats_url(server, query, login)))
            assert REFUSED in said


def nkey_user(folder: Path) -> tuple[Path, str]:
    """A file with a new seed, and its user for nats-server's configuration."""
    seed = nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER)
    path = folder / "user.nk"
    write_private(path, seed + b"\n")
    return path, bytes(nkeys.from_seed(bytearray(seed)).public_key).decode()


REFUSED = "it refuses the user name, password, token or key"


async def test_nats_knows_a_user_by_certificate_token_password_or_nkey(
    tmp_path: Path, certificates: Certificates
) -> None:
    """In the URL, or in a file that it names."""
    mapped = nats_tls(certificates, demand=True).replace("verify:", "verify_and_map:")
    async with nats(tmp_path / "a", mapped + "authorization { users: [{ user: me }] }\n") as server:
        await use_broker(nats_url(server, certificates.query(client=True)))
    login = tmp_path / "login"
    async with nats(tmp_path / "b", 'authorization { token: "s3cret/token" }\n') as server:
        host = f"127.0.0.1:{server.port}"
        await use_broker(f"nats://s3cret%2Ftoken@{host}")
        assert REFUSED in await refusal(NatsMessaging(f"nats://s3cret@{host}"))
        write_private(login, b"s3cret/token")
        async with NatsMessaging(f"nats://{host}?login={login}"):
            pass
    async with nats(tmp_path / "c", USERS) as server:
        write_private(login, f"me:{PASSWORD}\n".encode())
        await use_broker(f"nats://127.0.0.1:{server.port}?login={login}")
    path, user = nkey_user(tmp_path)
    config = f"authorization {{ users: [{{ nkey: {user} }}] }}\n"
    async with nats(tmp_path / "d", config) as server:
        await use_broker(f"nats://127.0.0.1:{server.port}?nkey={path}")
        other, _ = nkey_user(tmp_path)
        said = await refusal(NatsMessaging(f"nats://127.0.0.1:{server.port}?nkey={other}"))
        assert REFUSED in said


async def test_what_a_user_has_no_right_to_is_counted(tmp_path: Path) -> None:
    """And everything else goes on over the same connection."""
    path, user = nkey_user(tmp_path)
    rights = '{ publish: { deny: "theirs.>" }, subscribe: { deny: "theirs.>" } }'
    config = f"authorization {{ users: [{{ nkey: {user}, permissions: {rights} }}] }}\n"
    drops: list[str] = []
    async with nats(tmp_path, config) as server:
        url = f"nats://127.0.0.1:{server.port}?nkey={path}"
        async with asyncio.timeout(20), NatsMessaging(url, on_drop=drops.append) as messaging:
            await use_broker(url)
            assert drops == []
            await messaging.publish("theirs.jobs", b"hello")
            await eventually(lambda: drops == ["nats_refused"])
            assert messaging.connected


@pytest.mark.parametrize(
    ("part", "error"),
    [
        (b"NATS USER JWT", "needs the JWT and the NKey seed"),
        (b"USER NKEY SEED", "its key cannot be used"),
    ],
)
async def test_a_spoilt_credentials_file_costs_no_more_than_the_connection(
    tmp_path: Path, part: bytes, error: str
) -> None:
    """With an operator and an account of its own, as nsc makes them. The file is read at each
    connect: one without a JWT must not be read for ever."""
    config, creds = jwt_account(tmp_path)
    async with nats(tmp_path / "server", config) as server:
        async with NatsMessaging(f"nats://127.0.0.1:{server.port}?creds={creds}") as messaging:
            good = creds.read_bytes()
            write_private(creds, good.replace(part, b"NOTHING"))
            away = asyncio.Event()
            back = asyncio.Event()
            with messaging.watch_connection(lambda up: (back if up else away).set()):
                await server.__aexit__()
                async with asyncio.timeout(20):
                    await away.wait()
                    back.clear()
                    await server.restart()
                    await eventually(lambda: error in str(messaging.client.last_error), 20)
                    write_private(creds, good)
                    await back.wait()


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
