"""Three nats-servers with JetStream, or three etcd members, as one cluster on loopback."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import httpx

from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.serve.embedded import EmbeddedEtcd, EmbeddedNats
from tests.builders import eventually
from tests.external import Certificates, nats_tls
from tests.ports import reserved_port
from tests.servers import PrivateServer

_LOOPBACK = "127.0.0.1"
#: An election of nats-server takes up to 9 s, and a new cluster may need two.
_FORMED_S = 60.0
#: JetStream's error code for a stream that does not exist.
_NO_STREAM = 10059


def nats_config(
    name: str,
    place: tuple[str, int],
    directory: Path,
    routes: Mapping[str, tuple[str, int]],
    login: tuple[str, str] | None = None,
    certificates: Certificates | None = None,
) -> str:
    """The configuration of the server `name`. place: where clients find it. routes: where each
    server of the cluster, this one too, listens for the others. login: user and password of clients
    and servers; None: everybody is let in.
    certificates: of clients' connections and, for both ends, of those between servers; None: no
    TLS."""
    known, asked, accounts = "", "", ""
    client_tls = route_tls = ""
    if certificates is not None:
        client_tls, route_tls = nats_tls(certificates), nats_tls(certificates, demand=True)
    if login is not None:
        known = f"{login[0]}:{login[1]}@"
        who = f'user: "{login[0]}", password: "{login[1]}"'
        asked = f"authorization {{ {who} }}"
        own = f"graph: {{ jetstream: enabled, users: [{{ {who} }}] }}\n"
        accounts = f"accounts {{ {own} }}"
    others = ", ".join(f'"nats://{known}{host}:{port}"' for host, port in routes.values())
    host, port = routes[name]
    return (
        f'server_name: "{name}"\nhost: {place[0]}\nport: {place[1]}\nmax_payload: 8MB\n'
        f'jetstream {{ store_dir: "{directory.resolve()}" }}\n'
        f"{accounts}\n{client_tls}"
        f'cluster {{ name: "test", host: {host}, port: {port}, routes: [{others}]\n'
        f"{asked}\n{route_tls} }}\n"
    )


def etcd_arguments(name: str, url: str, peers: Mapping[str, str], directory: Path) -> list[str]:
    """Of the member `name`. url: where clients find it. peers: the peer URL of each member. The
    timings are etcd's defaults."""
    cluster = ",".join(f"{member}={peer}" for member, peer in peers.items())
    return [
        *("--name", name, "--data-dir", str(directory / "data")),
        *("--listen-client-urls", url, "--advertise-client-urls", url),
        *("--listen-peer-urls", peers[name], "--initial-advertise-peer-urls", peers[name]),
        *("--initial-cluster", cluster, "--unsafe-no-fsync", "--log-level", "warn"),
    ]


class _NatsMember(EmbeddedNats):
    def __init__(self, directory: Path, port: int = 0, *, routes: Mapping[str, tuple[str, int]]):
        super().__init__(directory, port)
        self._routes = routes

    def _command(self) -> list[str]:
        program, option, config = super()._command()
        place = (_LOOPBACK, self.port)
        name = self.directory.name
        Path(config).write_text(nats_config(name, place, self.directory, self._routes))
        return [program, option, config]


class _EtcdMember(EmbeddedEtcd):
    def __init__(self, directory: Path, port: int = 0, *, peers: Mapping[str, str]):
        super().__init__(directory, port)
        self._peers = peers

    def _command(self) -> list[str]:
        own = etcd_arguments(self.directory.name, self.url, self._peers, self.directory)
        return [super()._command()[0], *own]

    async def _is_ready(self) -> bool:
        """Whether it listens. It is healthy only with a second one."""
        try:
            _, writer = await asyncio.open_connection(_LOOPBACK, self.port)
        except OSError:
            return False
        writer.close()
        return True


class Member(Protocol):
    """One server. answers: whether it runs, and is not frozen."""

    @property
    def url(self) -> str: ...

    @property
    def answers(self) -> bool: ...


M = TypeVar("M", bound=Member)


class Cluster(Generic[M]):
    """The members by name. query: of the URL, with the files of credentials."""

    def __init__(self, members: Mapping[str, M], query: str = ""):
        self.members, self._query = members, query

    @property
    def url(self) -> str:
        """Of all members."""
        return self._url_of(self.members.values())

    def _url_of(self, members: Iterable[M]) -> str:
        first, *others = [member.url for member in members]
        return ",".join([first, *(url.partition("://")[2] for url in others)]) + self._query


class NatsCluster(Cluster[M]):
    async def leader(self, stream: str) -> str:
        """The name of the server that leads the stream."""
        found: list[str] = []

        async def has_one() -> bool:
            info = await self._ask(f"$JS.API.STREAM.INFO.{stream}")
            found[:] = [leader] if (leader := (info.get("cluster") or {}).get("leader")) else []
            return bool(found)

        await eventually(has_one, _FORMED_S)
        return found[0]

    async def current(self, stream: str) -> None:
        """Returns when all replicas of the stream and of its consumers have what their leaders
        have: only then the next server may be restarted."""

        async def all_have_it() -> bool:
            info = await self._ask(f"$JS.API.STREAM.INFO.{stream}")
            listed = await self._ask(f"$JS.API.CONSUMER.LIST.{stream}")
            groups = [info, *(listed.get("consumers") or [])]
            return bool(listed.get("consumers")) and all(map(self._is_current, groups))

        await eventually(all_have_it, _FORMED_S)

    def _is_current(self, info: dict[str, Any]) -> bool:
        """info: of a stream or a consumer."""
        followers = (info.get("cluster") or {}).get("replicas") or []
        current = [peer for peer in followers if peer["current"] and not peer.get("offline")]
        return len(current) == len(self.members) - 1

    async def formed(self) -> None:
        """Returns when all servers can take a replica of a stream."""

        async def takes_a_stream() -> bool:
            config = b'{"name":"probe","subjects":["probe"],"storage":"memory","num_replicas":%d}'
            answer = await self._ask("$JS.API.STREAM.CREATE.probe", config % len(self.members))
            return "error" not in answer

        async def has_none() -> bool:
            """Also when an earlier request was carried out and its answer lost."""
            error = (await self._ask("$JS.API.STREAM.DELETE.probe")).get("error")
            return error is None or (isinstance(error, dict) and error["err_code"] == _NO_STREAM)

        await eventually(takes_a_stream, _FORMED_S)
        await eventually(has_none, _FORMED_S)

    async def _ask(self, subject: str, payload: bytes = b"") -> dict[str, Any]:
        """JetStream's answer, or what went wrong as its `error`."""
        running = [member for member in self.members.values() if member.answers]
        if not running:
            return {"error": "no server runs"}
        try:
            async with NatsMessaging(self._url_of(running), connect_timeout_s=2.0) as messaging:
                return json.loads(await messaging.request(subject, payload, timeout_s=2.0))
        except DynamoLiteError as exc:
            return {"error": str(exc)}


@asynccontextmanager
async def nats_cluster(folder: Path) -> AsyncIterator[NatsCluster[PrivateServer]]:
    routes = {f"n{number}": (_LOOPBACK, reserved_port()) for number in range(3)}
    kind = partial(_NatsMember, routes=routes)
    async with _running({name: PrivateServer(kind, folder / name) for name in routes}) as members:
        cluster = NatsCluster(members)
        await cluster.formed()
        yield cluster


@asynccontextmanager
async def _running(
    members: Mapping[str, PrivateServer],
) -> AsyncIterator[Mapping[str, PrivateServer]]:
    async with AsyncExitStack() as stack:
        for member in members.values():
            stack.push_async_callback(member.stop)
        async with asyncio.TaskGroup() as starting:
            for member in members.values():
                starting.create_task(member.start())
        yield members


class EtcdCluster(Cluster[M]):
    """tls: of its clients; None: without."""

    def __init__(
        self, members: Mapping[str, M], query: str = "", tls: ssl.SSLContext | None = None
    ):
        super().__init__(members, query)
        self._tls = tls

    async def leader(self) -> str:
        """The name of the member that leads."""
        found: list[str] = []

        async def has_one() -> bool:
            for name, member in self.members.items():
                if member.answers and await self._leads(member):
                    found.append(name)
                    return True
            return False

        await eventually(has_one, _FORMED_S)
        return found[0]

    async def healthy(self) -> None:
        """Returns when every member that runs can serve."""
        for member in self.members.values():
            if member.answers:
                await eventually(partial(self._is_healthy, member), _FORMED_S)

    async def _leads(self, member: M) -> bool:
        status = await self._post(member, "/v3/maintenance/status", {})
        own = status.get("header", {}).get("member_id")
        return own is not None and status.get("leader") == own

    async def _is_healthy(self, member: M) -> bool:
        return "header" in await self._post(member, "/v3/kv/range", {"key": "AA=="})

    async def _post(self, member: M, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of etcd's JSON gateway; empty if there is none."""
        try:
            async with httpx.AsyncClient(timeout=2.0, verify=self._tls or False) as client:
                answer = await client.post(member.url + path, json=body)
                return answer.json() if answer.status_code == 200 else {}
        except httpx.HTTPError:
            return {}


@asynccontextmanager
async def etcd_cluster(folder: Path) -> AsyncIterator[EtcdCluster[PrivateServer]]:
    peers = {f"e{number}": f"http://{_LOOPBACK}:{reserved_port()}" for number in range(3)}
    kind = partial(_EtcdMember, peers=peers)
    async with _running({name: PrivateServer(kind, folder / name) for name in peers}) as members:
        cluster = EtcdCluster(members)
        await cluster.healthy()
        yield cluster
