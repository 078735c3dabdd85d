"""Hosts of one machine: network namespaces with an address each, joined by a bridge.

It needs root. A link that is down, and a direction that is cut, drop packets silently: no
process gets a reset. Everything has a name with this process's id. Another process removes it at
the end; what is left if both are killed is removed by the next run.
"""

import contextlib
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dynamo_lite.runtime.process.death_signal import death_signal_hook

_ROOT = Path(__file__).parents[2]
#: No host has it: the bridge floods what goes there, and no host takes it.
_NOBODY = "02:00:00:00:00:01"
_NAMES = re.compile(r"\bdl(\d+)[a-z](?:-\d+)?\b")
_KILLED_S = 10.0
_ENTERED_S = 30.0
#: Of the packages iproute2 and util-linux.
_PROGRAMS = ("ip", "ss", "nsenter", "unshare")
_runs = itertools.count()


def unavailable() -> str:
    """Why no hosts can be made here; empty if they can."""
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        return f"network namespaces need {' and '.join(missing)}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"dl{os.getpid()}t"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
        _ip("link", "add", name, "type", "bridge")
        _ip("link", "del", name)
    except (OSError, subprocess.CalledProcessError) as exc:
        said = getattr(exc, "stderr", "") or str(exc)
        return f"network namespaces or bridges cannot be made: {said.strip()}"
    return ""


@dataclass(frozen=True)
class Host:
    """A namespace. address: of its only interface, `eth0`."""

    name: str
    address: str
    #: The bridge's end of its cable.
    port: str

    def start(
        self,
        command: Sequence[str],
        output: IO[bytes] | Path | int,
        *,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> "subprocess.Popen[bytes]":
        """Runs a command on this host, in a session of its own. It ends with the network, and with
        the thread that calls this."""
        with contextlib.ExitStack() as stack:
            stream = stack.enter_context(output.open("ab")) if isinstance(output, Path) else output
            process = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{self.name}", *command],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                preexec_fn=death_signal_hook(signal.SIGKILL),
                env=None if env is None else {**os.environ, **env},
                cwd=cwd,
            )
        try:
            self._entered(process)
        except BaseException:
            process.kill()
            process.wait()
            raise
        return process

    def link(self, *, up: bool) -> None:
        """Plugs the cable in or out."""
        _ip("link", "set", self.port, "up" if up else "down")

    def cut(self, *others: "Host") -> None:
        """From now on nothing that this host sends reaches the others. They still reach it."""
        for other in others:
            self._ip("neigh", "replace", other.address, "lladdr", _NOBODY, "dev", "eth0")

    def heal(self, *others: "Host") -> None:
        for other in others:
            self._ip("neigh", "del", other.address, "dev", "eth0", check=False)

    def sends_to(self, other: "Host", port: int) -> bool:
        """Whether a server at this port has a connection with the other host that its kernel
        has not given up."""
        return self._connected(f"( sport = :{port} and dst {other.address} )")

    def undelivered(self, other: "Host") -> int:
        """Bytes over TCP that its kernel has for the other host and that are not acknowledged, also
        those of processes that have ended."""
        listed = self._sockets("--all", "dst", other.address)
        return sum(int(line.split()[2]) for line in listed.splitlines())

    def serves(self, port: int) -> bool:
        """Whether anybody is connected to a server at this port."""
        return self._connected(f"( sport = :{port} )")

    def kill(self) -> None:
        """Kills every process of this host, as a power cut would. It does nothing if the host is
        gone: several runs may remove at once what one has left."""
        deadline = time.monotonic() + _KILLED_S
        while pids := self._ip("netns", "pids", self.name, check=False, inside=False).split():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            assert time.monotonic() < deadline, f"processes of {self.name} do not end: {pids}"
            time.sleep(0.02)

    def _entered(self, process: "subprocess.Popen[bytes]") -> None:
        """Returns when the process is on this host, so that `kill` finds it, or has ended."""
        network = os.stat(f"/run/netns/{self.name}").st_ino
        deadline = time.monotonic() + _ENTERED_S
        while process.poll() is None:
            with contextlib.suppress(OSError):  # it has ended, and was not reaped
                if os.stat(f"/proc/{process.pid}/ns/net").st_ino == network:
                    return
            assert time.monotonic() < deadline, f"{process.args} does not start on {self.name}"
            time.sleep(0.002)

    def _connected(self, which: str) -> bool:
        return bool(self._sockets("state", "established", which))

    def _sockets(self, *which: str) -> str:
        command = ["ss", "--no-header", "--tcp", "-n", *which]
        return _output("nsenter", f"--net=/run/netns/{self.name}", *command)

    def _ip(self, *arguments: str, check: bool = True, inside: bool = True) -> str:
        return _ip(*(("-n", self.name) if inside else ()), *arguments, check=check)


@contextlib.contextmanager
def hosts(number: int) -> Iterator[list[Host]]:
    """`number` hosts that reach one another and this process. All of it is gone at the end, with
    the processes that run there, and also if this process is killed."""
    remove_left_overs()
    bridge = f"dl{os.getpid()}{'abcdefghijklmnopqrstuvwxyz'[next(_runs) % 26]}"
    command = [sys.executable, "-m", "tests.hosts.network", bridge]
    # It removes all of it when its input ends.
    with subprocess.Popen(command, stdin=-1, cwd=_ROOT, start_new_session=True) as remover:
        net = _free_net()
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{net}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        yield [_made(bridge, net, index) for index in range(number)]
    assert remover.returncode == 0


def remove_left_overs(over: str = "") -> None:
    """Removes what was made by processes that do not run any more. over: a bridge that goes, with
    its hosts, whether its process runs or not."""
    listed = _ip("netns", "list") + _ip("-brief", "link", "show", "type", "bridge")
    for found in _NAMES.finditer(listed):
        if found[0].partition("-")[0] != over and Path(f"/proc/{found[1]}").exists():
            continue
        if "-" in found[0]:
            _remove(Host(found[0], "", ""))
        else:
            _ip("link", "del", found[0], check=False)


def _made(bridge: str, net: str, index: int) -> Host:
    host = Host(f"{bridge}-{index}", f"{net}.{index + 10}", f"{bridge}{index}")
    _ip("netns", "add", host.name)
    _ip("link", "add", host.port, "type", "veth", "peer", "eth0", "netns", host.name)
    _ip("link", "set", host.port, "master", bridge, "up")
    _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _ip("-n", host.name, "link", "set", device, "up")
    return host


def _remove(host: Host) -> None:
    if not Path(f"/run/netns/{host.name}").exists():
        return
    host.kill()
    _ip("netns", "del", host.name, check=False)


def _free_net() -> str:
    """The first three numbers of a private network that this machine has no route to."""
    used = _ip("-4", "addr", "show") + _ip("route", "show", "table", "all")
    for _ in range(100):
        net = f"10.{random.randrange(100, 250)}.{random.randrange(256)}"
        if f"{net}." not in used:
            return net
    raise AssertionError("no free network")


def _ip(*arguments: str, check: bool = True) -> str:
    return _output("ip", *arguments, check=check)


def _output(*command: str, check: bool = True) -> str:
    return subprocess.run(command, check=check, capture_output=True, text=True, timeout=20).stdout


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.stdin.read()
        remove_left_overs(sys.argv[1])
    else:  # for scripts/test
        print(unavailable())
