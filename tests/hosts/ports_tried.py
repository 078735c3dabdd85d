"""A stranger tries every TCP port of the graph's hosts, from a host of its own."""

import asyncio
import json
import subprocess
import sys

from dynamo_lite.request_plane.framing import parse_address
from tests.hosts.program import Program
from tests.hosts.rig import API_KEY, Rig
from tests.hosts.subjects import dropped, restarts
from tests.process.command import ROOT

#: Until it has tried everything at ports that say nothing for seconds.
_TRIED_S = 400.0
#: Characters of each answer in the report of a failure.
_SHOWN = 100


async def try_every_port(rig: Rig) -> None:
    """Without any secret. Raises AssertionError when a port tells it what must be told to nobody,
    when it ends a process, or when a stream's port does not count it."""
    before, counted = restarts(rig), await dropped(rig, "stream")
    streams = {f"{p.host.address}:{port}" for p, port in await stream_ports(rig)}
    kv = {f"{p.host.address}:{port}" for p, port in await kv_ports(rig)}
    hosts = [*rig.server_hosts, *(program.host for program in rig.programs)]
    places = {f"{host.address}:{port}" for host in hosts for port in host.ports()}
    assert len(places) >= 2 * len(hosts) and streams | kv <= places, places
    heard = await asyncio.to_thread(_stranger_hears, rig, sorted(places))
    assert set(heard) == places
    for place, (plain, encrypted) in heard.items():
        if wrong := _secrets_in(rig, plain + encrypted):
            raise AssertionError(f"{place} tells a stranger {wrong}")
        if (place in streams and encrypted) or (place in kv and plain + encrypted):
            raise AssertionError(f"{place} answers a stranger: {plain + encrypted!r}")
    said = "".join(plain + encrypted for plain, encrypted in heard.values())
    for refused in ("Authorization Violation", "401 Unauthorized", "dynamo_lite_process_info"):
        assert refused in said, f"no port has said {refused!r}: {_short(heard)}"
    assert await dropped(rig, "stream") > counted
    assert restarts(rig) == before


def _short(heard: dict[str, list[str]]) -> dict[str, list[str]]:
    return {place: [one[:_SHOWN] for one in said] for place, said in heard.items()}


async def stream_ports(rig: Rig) -> list[tuple[Program, int]]:
    """Of each decode worker: the port of its connections to Frontends."""
    streams = [member.transport.stream for member in await rig.members()]
    ports = dict(parse_address(stream) for stream in streams if stream)
    return [(worker, ports[worker.host.address]) for worker in rig.services["VllmWorker"]]


async def kv_ports(rig: Rig) -> list[tuple[Program, int]]:
    """Of each worker with an engine that computes: those of UCX, at least one. They are neither of
    its connections nor of its status server."""
    known = {(program.name, port) for program, port in await stream_ports(rig)}
    found: list[tuple[Program, int]] = []
    for program in (one for service in rig.kind.kv for one in rig.services[service]):
        status = int(rig.status_url(program).rpartition(":")[2])
        others = {status, *(port for name, port in known if name == program.name)}
        ports = [port for port in program.host.ports() if port not in others]
        assert ports, f"{program.name} has no port for KV"
        found += [(program, port) for port in ports]
    return found


def _stranger_hears(rig: Rig, places: list[str]) -> dict[str, list[str]]:
    """By port: what it is told without TLS and over TLS."""
    command = [sys.executable, "-m", "tests.hosts.stranger", *places]
    process = rig.stranger.start(command, subprocess.PIPE, cwd=ROOT)
    said, _ = process.communicate(timeout=_TRIED_S)
    return json.loads(said)


def _secrets_in(rig: Rig, heard: str) -> list[str]:
    """What must be told to nobody: credentials, what is in etcd and in NATS, answers."""
    login, secret = ((rig.directory / name).read_text() for name in ("login", "secret"))
    hidden = (login.partition(":")[2], secret.strip(), API_KEY)
    inside = ('"kvs"', '"leases"', "PONG", "MSG ", "RMSG ", "VllmWorker/generate", '"choices"')
    return [name for name in (*hidden, *inside) if name in heard]
