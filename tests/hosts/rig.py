"""A graph on hosts of its own: three NATS servers, three etcd members, Frontends and workers."""

import asyncio
import secrets
import ssl
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.request_plane.framing import parse_address
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.serve import embedded
from dynamo_lite.serve.certificate_folder import make_certificates
from dynamo_lite.serve.run_state import read_run, write_private
from tests.builders import eventually
from tests.clusters import EtcdCluster, NatsCluster, etcd_arguments, nats_config
from tests.external import Certificates
from tests.hosts.network import Host, hosts
from tests.hosts.program import Program
from tests.vllm.graph import CACHE

NAMESPACE = "hosts"
HTTP_PORT = 8000
#: Of the Frontends.
API_KEY = secrets.token_hex(16)
#: A process that loads vLLM's modules on a busy machine must not lose it.
LEASE_TTL_S = 10
_NATS_PORT, _ETCD_PORT, _ROUTE_PORT, _PEER_PORT = 4222, 2379, 6222, 2380
#: Of each kind, on hosts of their own.
_SERVERS = 3
_READY_S = 400.0
_LOOK_S = 0.5


#: How many hosts there are of each. The workers' engines compute nothing.
SERVICES = {"Frontend": 2, "VllmWorker": 2}
_GRAPH = "tests.process.roles_graph:Served"
_OPTIONS = (
    *("-f", "configs/agg.yaml", "--VllmWorker.step-s=0.02"),
    # Longer than the longest answer: a Frontend that ends breaks none.
    "--Graph.grace-s=20",
)


def same_clocks() -> str:
    """Why all hosts have the same monotonic clocks here; empty if they differ."""
    has = Path("/proc/self/ns/time").exists()
    return "" if has else "monotonic clocks that differ need time namespaces (Linux 5.6)"


def _own_clock(number: int) -> list[str]:
    """Runs a command on a host that was started at another time than the others: CLOCK_MONOTONIC
    and CLOCK_BOOTTIME differ by 40 s and more."""
    if same_clocks():
        return []
    offset = str(40 * number)
    clocks = ["--monotonic", offset, "--boottime", offset]
    return ["unshare", "--time", *clocks, "--fork", "--kill-child", "--"]


def _etcd_tls(certificates: Certificates) -> Iterator[str]:
    """Options: clients and members need a certificate of the authority."""
    certificate, key = certificates.files("server")
    for whose in ("", "peer-"):
        yield from (f"--{whose}cert-file", str(certificate), f"--{whose}key-file", str(key))
        yield from (f"--{whose}client-cert-auth", f"--{whose}trusted-ca-file")
        yield str(certificates.folder / "ca.pem")


@dataclass
class Rig:
    """Async context manager. log files and state are in `directory`."""

    directory: Path
    nats: NatsCluster[Program] = field(init=False)
    etcd: EtcdCluster[Program] = field(init=False)
    #: By service.
    services: dict[str, list[Program]] = field(init=False, default_factory=dict)
    _started: list[Program] = field(init=False, default_factory=list)
    _stack: AsyncExitStack = field(init=False, default_factory=AsyncExitStack)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.callback(self._reap)  # after the hosts have killed what runs there
            needed = 2 * _SERVERS + sum(SERVICES.values())
            made = stack.enter_context(hosts(needed))
            login = ("graph", secrets.token_hex(16))
            write_private(self.directory / "login", ":".join(login).encode())
            certificates = self._certificates([host.address for host in made[: 2 * _SERVERS]])
            self.nats = self._nats(made[:_SERVERS], login, certificates)
            self.etcd = self._etcd(made[_SERVERS : 2 * _SERVERS], certificates)
            self._started += [*self.nats.members.values(), *self.etcd.members.values()]
            for server in self._started:
                server.start()
            await self.nats.formed()
            await self.etcd.healthy()
            make_certificates(self.directory / "graph", NAMESPACE, SERVICES)
            free = made[2 * _SERVERS :]
            for service, number in SERVICES.items():
                self.services[service] = [
                    self._service(service, index, free.pop(0)) for index in range(number)
                ]
            self._started += self.programs
            await self._start_services()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def programs(self) -> list[Program]:
        return [one for group in self.services.values() for one in group]

    @property
    def workers(self) -> list[Program]:
        return [one for one in self.programs if one not in self.services["Frontend"]]

    @property
    def nats_hosts(self) -> list[Host]:
        return [server.host for server in self.nats.members.values()]

    @property
    def etcd_hosts(self) -> list[Host]:
        return [member.host for member in self.etcd.members.values()]

    @property
    def server_hosts(self) -> list[Host]:
        return [*self.nats_hosts, *self.etcd_hosts]

    async def leases(self) -> set[int]:
        """Of the members, by the endpoints in etcd. Raises DynamoLiteError."""
        async with EtcdStore(self.etcd.url) as store:
            found = await store.get_prefix(names.components_prefix(NAMESPACE))
        return {decode_json(value, EndpointRecord).lease_id for value in found.values()}

    async def stream_ports(self) -> list[tuple[Program, int]]:
        """Of each decode worker: the port of its connections to Frontends."""
        async with EtcdStore(self.etcd.url) as store:
            found = await store.get_prefix(names.components_prefix(NAMESPACE))
        streams = [decode_json(value, EndpointRecord).transport.stream for value in found.values()]
        ports = dict(parse_address(stream) for stream in streams if stream)
        return [(worker, ports[worker.host.address]) for worker in self.services["VllmWorker"]]

    async def whole(self) -> None:
        """Returns when exactly the processes that run now are members: none is being restarted, and
        none of the dead is still there. Raises AssertionError if that takes too long."""
        seen: dict[str, set[int]] = {}

        async def all_joined() -> bool:
            await asyncio.sleep(_LOOK_S)
            try:
                seen["members"] = await self.leases()
            except DynamoLiteError:
                return False
            seen["running"] = {self.lease_of(program) for program in self.programs}
            return seen["members"] == seen["running"] and 0 not in seen["running"]

        try:
            await eventually(all_joined, _READY_S)
        except TimeoutError as exc:
            raise AssertionError(f"not all processes are members: {seen}") from exc

    async def servers_restarted(self, stream: str) -> None:
        """One after the other. stream: whose replicas are current before the next one ends."""
        for member in self.nats.members.values():
            await member.end()
            member.start()
            await self.nats.current(stream)
        for member in self.etcd.members.values():
            await member.end()
            member.start()
            await self.etcd.healthy()

    @property
    def restarts(self) -> dict[str, int]:
        return {program.name: program.restarts for program in self.programs}

    async def standing(self) -> tuple[dict[str, int], set[int]]:
        """What changes when a process ends or a member leaves. Raises DynamoLiteError."""
        return self.restarts, await self.leases()

    def lease_of(self, program: Program) -> int:
        """Of its process; 0 if there is none, or it has none yet."""
        service = program.name.rpartition("-")[0]
        run = read_run(self.directory / program.name / "lone" / f"{service}-0")
        return int(run.processes[0].lease or "0", 16) if run and run.processes else 0

    @contextmanager
    def unplugged(self, *vanished: Host) -> Iterator[None]:
        """The hosts have vanished: packets to and from them are lost."""
        for host in vanished:
            host.link(up=False)
        try:
            yield
        finally:
            for host in vanished:
                host.link(up=True)

    @contextmanager
    def parted(self, one: Sequence[Host], other: Sequence[Host]) -> Iterator[None]:
        with self.deaf(one, other), self.deaf(other, one):
            yield

    @contextmanager
    def deaf(self, one: Sequence[Host], other: Sequence[Host]) -> Iterator[None]:
        """Nothing that `other` sends reaches `one`; `one` still reaches `other`."""
        for host in other:
            host.cut(*one)
        try:
            yield
        finally:
            for host in other:
                host.heal(*one)

    def _reap(self) -> None:
        for program in self._started:
            program.reap()

    def _nats(
        self, made: list[Host], login: tuple[str, str], certificates: Certificates
    ) -> NatsCluster[Program]:
        at = {f"n{number}": host for number, host in enumerate(made)}
        routes = {name: (host.address, _ROUTE_PORT) for name, host in at.items()}
        members: dict[str, Program] = {}
        for name, host in at.items():
            folder = self.directory / name
            folder.mkdir()
            config, place = folder / "nats.conf", (host.address, _NATS_PORT)
            config.write_text(nats_config(name, place, folder, routes, login, certificates))
            command = [embedded.program("nats-server"), "-c", str(config)]
            url = f"tls://{host.address}:{_NATS_PORT}"
            members[name] = Program(host, name, command, folder / "nats.log", url)
        query = f"{certificates.query()}&login={self.directory / 'login'}"
        return NatsCluster(members, query)

    def _etcd(self, made: list[Host], certificates: Certificates) -> EtcdCluster[Program]:
        at = {f"e{number}": host for number, host in enumerate(made)}
        peers = {name: f"https://{host.address}:{_PEER_PORT}" for name, host in at.items()}
        members: dict[str, Program] = {}
        for name, host in at.items():
            folder = self.directory / name
            folder.mkdir()
            url = f"https://{host.address}:{_ETCD_PORT}"
            command = [
                embedded.program("etcd"),
                *etcd_arguments(name, url, peers, folder),
                *_etcd_tls(certificates),
            ]
            members[name] = Program(host, name, command, folder / "etcd.log", url)
        tls = ssl.create_default_context(cafile=certificates.folder / "ca.pem")
        tls.load_cert_chain(*certificates.files("client"))
        return EtcdCluster(members, certificates.query(client=True), tls)

    def _certificates(self, addresses: list[str]) -> Certificates:
        """The servers' are for these addresses."""
        made = Certificates(self.directory / "certificates", addresses)
        made.folder.mkdir()
        made.make()
        return made

    def _service(self, service: str, index: int, host: Host) -> Program:
        name, number = f"{service}-{index}", int(host.name.rpartition("-")[2])
        state = self.directory / name
        state.mkdir()
        CACHE.mkdir(parents=True, exist_ok=True)
        (state / "cache").symlink_to(CACHE.resolve())
        command = [
            *_own_clock(number),
            *(sys.executable, "-m", "dynamo_lite.cli.cli", "serve", _GRAPH),
            *("--service-name", service, "--state-dir", str(state)),
            *("--nats-url", self.nats.url, "--etcd-url", self.etcd.url),
            *("--namespace", NAMESPACE, f"--Graph.certificates={self.directory / 'graph'}"),
            *(f"--Graph.bind-host={host.address}", *_OPTIONS),
            f"--Graph.lease-ttl-s={LEASE_TTL_S}",
        ]
        if service == "Frontend":
            command += [f"--Frontend.host={host.address}", f"--Frontend.port={HTTP_PORT}"]
        else:
            command += [f"--{service}.ServiceArgs.workers=1"]
        env = {"VLLM_API_KEY": API_KEY} if service == "Frontend" else {}
        log = self.directory / f"{name}.log"
        return Program(host, name, command, log, ready_line=r" ready$|^ready ", env=env)

    async def _start_services(self) -> None:
        for program in self.programs:
            program.start()
        for program in self.programs:
            await program.ready()
