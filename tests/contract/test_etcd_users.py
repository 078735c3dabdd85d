"""The users that `dynamo-lite access etcd --make` makes, in a real etcd."""

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from aetcd import rpc

from dynamo_lite.cli import access
from dynamo_lite.cli.access import make_users
from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.protocol.permissions import all_permissions
from dynamo_lite.runtime.address import parse_etcd_url
from dynamo_lite.runtime.etcd.client import EtcdClient, open_channel
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.store import Lease, Put, Store
from dynamo_lite.serve.embedded import EmbeddedEtcd, etcdctl
from dynamo_lite.serve.run_state import RunState
from tests.builders import eventually, loop_time, running_here
from tests.servers import PrivateServer

PASSWORDS = {"root": "first", "n-Router": "second"}
ROUTER = [all_permissions("n")["Router"]]


def logins(folder: Path, **changed: str) -> Path:
    folder.mkdir(exist_ok=True)
    for user, password in (PASSWORDS | changed).items():
        path = folder / user
        path.write_text(f"{user}:{password}\n")
        path.chmod(0o600)
    return folder


async def test_users_of_a_call_that_ended_halfway_get_the_passwords_of_the_files(tmp_path: Path):
    """While authentication is off, etcd takes any password for right."""
    async with EmbeddedEtcd(tmp_path / "etcd") as etcd:
        for user in PASSWORDS:
            await etcdctl(etcd.url, "user", "add", user, timeout_s=30, typed="old\n")
        folder = logins(tmp_path / "logins")
        await make_users(etcd.url, "n", ROUTER, folder)

        async def log_in(user: str, password: str) -> None:
            words = ("user", "get", user)
            await etcdctl(etcd.url, *words, timeout_s=30, user=user, password=password)

        for user, password in PASSWORDS.items():
            await log_in(user, password)
        with pytest.raises(StartupError, match="authentication failed"):
            await log_in("root", "old")
        # Authentication is on: made again, with another password.
        logins(folder, **{"n-Router": "third"})
        await make_users(etcd.url, "n", ROUTER, folder)
        await log_in("n-Router", "third")
        # The password of root, as which the calls log in, is changed by hand before.
        as_root = {"user": "root", "password": "first"}
        await etcdctl(etcd.url, "user", "passwd", "root", timeout_s=30, typed="fourth\n", **as_root)
        await make_users(etcd.url, "n", ROUTER, logins(folder, root="fourth"))
        await log_in("n-Router", "second")


async def test_users_are_changed_while_their_graph_runs(tmp_path: Path):
    """Each change ends tokens, also of calls on their way."""
    folder, key = logins(tmp_path / "logins"), ROUTER[0].write[0]
    as_root = {"user": "root", "password": PASSWORDS["root"]}
    written = [0] * 8

    async def write(number: int, store: Store, lease: Lease) -> None:
        while True:
            await store.put(f"{key}{number}", b"", lease=lease)
            written[number] += 1

    async def follow(store: Store) -> None:
        async with store.watch(key) as events:
            while not isinstance(event := await anext(events), Put) or event.key != f"{key}last":
                pass

    async with EmbeddedEtcd(tmp_path / "etcd") as etcd:
        await make_users(etcd.url, "n", ROUTER, folder)
        async with (
            EtcdStore(f"{etcd.url}?login={folder / 'n-Router'}") as store,
            store.lease(5.0) as lease,
            asyncio.TaskGroup() as group,
        ):
            follower = group.create_task(follow(store))
            writers = [group.create_task(write(n, store, lease)) for n in range(len(written))]
            for _ in range(8):
                words = ("user", "passwd", "n-Router")
                await etcdctl(etcd.url, *words, timeout_s=30, typed="second\n", **as_root)
                written[:] = [0] * len(written)
                await eventually(lambda: all(written))
            for writer in writers:
                writer.cancel()
            assert await lease.verify() is None
            await store.put(f"{key}last", b"", lease=lease)
            async with asyncio.timeout(10):
                await follower


async def test_a_password_that_etcdctl_would_cut_is_refused(tmp_path: Path):
    folder = logins(tmp_path / "logins", **{"n-Router": "two words"})
    with pytest.raises(ConfigError, match="n-Router: etcdctl reads a password to its first blank"):
        await make_users("http://127.0.0.1:1", "n", ROUTER, folder)


def test_etcd_is_reached_with_the_certificate_of_the_graph_that_runs_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = RunState(
        pid=os.getpid(), started_at=0.0, graph="g", namespace="n", certificates="/certificates"
    )
    urls: list[str] = []

    async def make_users(url: str, *_: Any) -> None:
        urls.append(url)

    monkeypatch.setattr(access, "make_users", make_users)
    asked = "https://etcd.invalid:2379"
    with running_here(tmp_path, run):
        for namespace in ("n", "other"):
            access.etcd(
                namespace=namespace,
                make=tmp_path,
                etcd_url=asked,
                state_dir=tmp_path,
                certificates=None,
            )
    assert ["Operator.pem" in url for url in urls] == [True, False]


async def test_an_etcd_that_does_not_answer_may_want_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(access, "_ANSWER_S", 1)
    with pytest.raises(StartupError, match=r"does it want https:// and --certificates\?$"):
        await make_users("http://127.0.0.1:1", "n", ROUTER, logins(tmp_path / "logins"))


async def test_who_waits_for_a_token_waits_no_longer_than_its_own_call(etcd_server: PrivateServer):
    """A lease's refresh too, behind others that authenticate at a member that hangs."""
    url = etcd_server.url.replace("://", "://user:password@")
    client = EtcdClient(parse_etcd_url(url), open_channel)
    client.timeout_s, read = 1.0, rpc.RangeRequest(key=b"key")
    await client.call(read)
    etcd_server.freeze()
    client.metadata, began = None, loop_time()
    reads = [asyncio.create_task(client.call(read)) for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(rpc.AioRpcError) as refresh:
        await client.call(rpc.LeaseKeepAliveRequest(ID=1), 0.3)
    assert refresh.value.code() is rpc.StatusCode.DEADLINE_EXCEEDED
    assert loop_time() - began < 0.9
    failed = await asyncio.gather(*reads, return_exceptions=True)
    assert {type(one) for one in failed} == {rpc.AioRpcError} and loop_time() - began < 1.9
    etcd_server.thaw()
    await client.call(read)
    await client.close()


async def test_what_got_no_token_at_a_member_that_hangs_goes_to_the_next(
    etcd_server: PrivateServer,
):
    """A write too: it was certainly not sent."""
    with socket.create_server(("127.0.0.1", 0)) as hangs:  # it accepts, and says nothing
        first, rest = f"127.0.0.1:{hangs.getsockname()[1]}", etcd_server.url.partition("://")[2]
        client = EtcdClient(parse_etcd_url(f"http://user:password@{first},{rest}"), open_channel)
        client.timeout_s = 0.5
        await client.call(rpc.PutRequest(key=b"key", value=b"value"))
        reply = await client.call(rpc.RangeRequest(key=b"key"))
        assert reply.kvs[0].value == b"value"
        await client.close()
