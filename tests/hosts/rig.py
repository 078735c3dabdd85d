"""A graph on hosts of its own: three NATS servers, three etcd members, Frontends and workers."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from dynamo_lite.serve import embedded
from tests.builders import eventually, graph_secret
from tests.clusters import EtcdCluster, NatsCluster, etcd_arguments, nats_config
from tests.hosts.network import Host, heal, hosts, partition

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = "hosts"
HTTP_PORT = 8000
_NATS_PORT, _ETCD_PORT, _ROUTE_PORT, _PEER_PORT = 4222, 2379, 6222, 2380
_READY_S = 400.0
_ENDED_S = 60.0


@dataclass(frozen=True)
class Kind:
    """What runs on the hosts. options: of every command. services: how many hosts of each."""

    graph: str
    options: tuple[str, ...]
    services: dict[str, int]


NULL = Kind(
    graph="tests.process.fleet_graph:Decoding",
    options=("--Graph.lease-ttl-s=6", "--Graph.grace-s=10", "--Graph.restart-max-s=1"),
    services={"Caller": 2, "VllmWorker": 2},
)
"""Decode workers whose engines compute nothing, and Frontends without HTTP that call them."""

VLLM = Kind(
    graph="graphs.disagg:Frontend",
    options=("-f", "configs/chaos.yaml", "--Graph.lease-ttl-s=10", "--Common.queue.replicas=3"),
    services={"Frontend": 1, "VllmWorker": 1, "PrefillWorker": 1},
)
"""vLLM with the tiny model; KV goes over TCP from host to host."""

_ENVIRONMENT = {
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": "eth0",
    "PYTHONPATH": str(ROOT),
    "TORCH_COMPILE_DISABLE": "1",
}


@dataclass(eq=False)
class Program:
    """A command on a host, which may be killed and started again. log: grows over restarts."""

    host: Host
    name: str
    command: Sequence[str]
    log: Path
    url: str = ""
    #: What its output has when it is ready; empty: nothing.
    ready_line: str = ""
    _process: "subprocess.Popen[bytes] | None" = None
    _seen: int = 0

    @property
    def answers(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        self._seen = self.log.stat().st_size if self.log.exists() else 0
        self._process = self.host.start(self.command, self.log, env=_ENVIRONMENT)

    async def ready(self) -> None:
        """Raises AssertionError when it has ended instead."""

        def said() -> bool:
            text = self.log.read_bytes()[self._seen :].decode(errors="replace")
            assert self.answers, f"{self.name} has ended: {text[-2000:]}"
            return re.search(self.ready_line, text, re.MULTILINE) is not None

        await eventually(said, _READY_S)

    async def end(self, sig: int = signal.SIGTERM) -> int:
        """Ends it, with all its processes if they do not end by themselves. The exit code."""
        process = self._process
        assert process is not None
        if process.poll() is None:
            os.killpg(process.pid, sig)  # `unshare` does not pass signals on
        await eventually(lambda: process.poll() is not None, _ENDED_S)
        return process.returncode

    async def kill(self) -> None:
        await self.end(signal.SIGKILL)

    def reap(self) -> None:
        """Waits for its end, after its host was killed."""
        if self._process is not None:
            self._process.wait(timeout=_ENDED_S)


def _own_clock(number: int) -> list[str]:
    """Runs a command on a host that was started at another time than the others: CLOCK_MONOTONIC
    and CLOCK_BOOTTIME differ by 40 s and more. The wall clock is the machine's."""
    if not Path("/proc/self/ns/time").exists():
        return []
    offset = str(40 * number)
    clocks = ["--monotonic", offset, "--boottime", offset]
    return ["unshare", "--time", *clocks, "--fork", "--kill-child", "--"]


@dataclass
class Rig:
    """Async context manager. log files and state are in `directory`."""

    directory: Path
    kind: Kind
    nats: NatsCluster[Program] = field(init=False)
    etcd: EtcdCluster[Program] = field(init=False)
    #: By service.
    services: dict[str, list[Program]] = field(init=False, default_factory=dict)
    _started: list[Program] = field(init=False, default_factory=list)
    _stack: AsyncExitStack = field(init=False, default_factory=AsyncExitStack)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.callback(self._reap)  # after the hosts have killed what runs there
            made = stack.enter_context(hosts(3 + sum(self.kind.services.values())))
            self.nats, self.etcd = self._servers(made[:3])
            self._started += [*self.nats.members.values(), *self.etcd.members.values()]
            for server in self._started:
                server.start()
            await self.nats.formed()
            await self.etcd.healthy()
            graph_secret(self.directory / "secret")
            free = made[3:]
            for service, number in self.kind.services.items():
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
    def frontends(self) -> list[str]:
        return [f"http://{one.host.address}:{HTTP_PORT}" for one in self.services["Frontend"]]

    @property
    def programs(self) -> list[Program]:
        return [one for group in self.services.values() for one in group]

    @property
    def server_hosts(self) -> list[Host]:
        return [server.host for server in self.nats.members.values()]

    @contextmanager
    def unplugged(self, host: Host) -> Iterator[None]:
        """The host has vanished: packets to and from it are lost."""
        host.link(up=False)
        try:
            yield
        finally:
            host.link(up=True)

    @contextmanager
    def parted(self, one: Sequence[Host], other: Sequence[Host]) -> Iterator[None]:
        partition(one, other)
        try:
            yield
        finally:
            heal(one, other)

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

    def _servers(self, made: list[Host]) -> tuple[NatsCluster[Program], EtcdCluster[Program]]:
        names = [f"n{number}" for number in range(len(made))]
        at = dict(zip(names, made, strict=True))
        routes = {name: (host.address, _ROUTE_PORT) for name, host in at.items()}
        peers = {name: f"http://{host.address}:{_PEER_PORT}" for name, host in at.items()}
        nats: dict[str, Program] = {}
        etcd: dict[str, Program] = {}
        for name, host in at.items():
            folder = self.directory / name
            (folder / "nats").mkdir(parents=True)
            (folder / "etcd").mkdir()
            place = (host.address, _NATS_PORT)
            config = folder / "nats.conf"
            config.write_text(nats_config(name, place, folder / "nats", routes))
            program = embedded._program("nats-server")
            url = f"nats://{host.address}:{_NATS_PORT}"
            log = folder / "nats.log"
            nats[name] = Program(host, name, [program, "-c", str(config)], log, url)
            url = f"http://{host.address}:{_ETCD_PORT}"
            command = [
                embedded._program("etcd"),
                *etcd_arguments(name, url, peers, folder / "etcd"),
            ]
            etcd[name] = Program(host, name, command, folder / "etcd.log", url)
        return NatsCluster(nats), EtcdCluster(etcd)

    def _service(self, service: str, index: int, host: Host) -> Program:
        name = f"{service}-{index}"
        command = [
            *_own_clock(int(host.name.rpartition("-")[2])),
            *(sys.executable, "-m", "dynamo_lite.cli.cli", "serve", self.kind.graph),
            *("--service-name", service, "--state-dir", str(self.directory / name)),
            *("--nats-url", self.nats.url, "--etcd-url", self.etcd.url),
            *("--namespace", NAMESPACE, "--secret-file", str(self.directory / "secret")),
            *(f"--Graph.bind-host={host.address}", *self.kind.options),
        ]
        if service == "Frontend":
            command += [f"--Frontend.host={host.address}", f"--Frontend.port={HTTP_PORT}"]
        elif service == "Caller":
            command += [f"--Caller.results={self.directory / f'{name}.results'}"]
            command += ["--Caller.tokens=60"]
        else:
            command += [f"--{service}.ServiceArgs.workers=1"]
        log = self.directory / f"{name}.log"
        return Program(host, name, command, log, ready_line=r" ready$|^ready ")

    async def _start_services(self) -> None:
        for program in self.programs:
            program.start()
        for program in self.programs:
            await program.ready()
