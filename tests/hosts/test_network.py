"""The hosts themselves: what is cut is silent, what is healed works, and nothing is left."""

import subprocess
import sys

import pytest

from tests.hosts.network import Host, hosts, remove_left_overs, unavailable
from tests.hosts.wiretap import Wiretap
from tests.lacking import lacking
from tests.process.command import ROOT

pytestmark = pytest.mark.heavy


@pytest.fixture(autouse=True, scope="module")
def hosts_can_be_made() -> None:
    if why := unavailable():
        lacking(why)


_SERVER = """
import socket
server = socket.create_server(("0.0.0.0", 7000))
print("listening", flush=True)
while True:
    server.accept()[0].sendall(b"hello")
"""
_CLIENT = """
import socket, sys
try:
    print(socket.create_connection((sys.argv[1], 7000), timeout=1).recv(5).decode())
except TimeoutError:
    print("silence")
"""


def says(here: Host, there: Host) -> str:
    process = here.start([sys.executable, "-c", _CLIENT, there.address], subprocess.PIPE)
    return process.communicate(timeout=30)[0].decode().strip()


def test_links_and_directions_are_cut_silently_and_healed() -> None:
    servers: list[subprocess.Popen[bytes]] = []
    with hosts(3) as made:
        one, other, third = made
        for host in made:
            servers.append(server := host.start([sys.executable, "-c", _SERVER], subprocess.PIPE))
            assert server.stdout is not None and server.stdout.readline() == b"listening\n"
        assert says(one, other) == "hello"
        one.cut(other)
        assert [says(one, other), says(other, one)] == ["silence", "silence"]  # no answer, no way
        assert says(one, third) == says(third, other) == "hello"
        one.heal(other)
        assert says(one, other) == says(other, one) == "hello"
        other.link(up=False)
        assert says(one, other) == "silence"
        other.link(up=True)
        assert says(one, other) == "hello"
        names = [host.name for host in made]
    for server in servers:
        server.communicate(timeout=10)
        assert server.returncode == -9
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert not any(name in listed.stdout for name in names)


def test_a_wiretap_reads_what_goes_over_a_cable() -> None:
    with hosts(3) as [one, other, third]:
        server = other.start([sys.executable, "-c", _SERVER], subprocess.PIPE)
        assert server.stdout is not None and server.stdout.readline() == b"listening\n"
        with Wiretap([one]) as own, Wiretap([third]) as foreign:
            assert says(one, other) == "hello"
        assert b"hello" in own.of_ports({7000}) and own.lost == foreign.lost == 0
        assert b"hello" not in own.of_other_ports({7000}) + foreign.of_other_ports(())
    server.communicate(timeout=10)


def test_a_failure_leaves_nothing() -> None:
    made: list[tuple[Host, subprocess.Popen[bytes]]] = []
    with pytest.raises(RuntimeError), hosts(1) as [host]:
        made.append((host, host.start([sys.executable, "-c", _SERVER], subprocess.DEVNULL)))
        raise RuntimeError
    [(host, server)] = made
    assert server.wait(timeout=10) == -9
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert host.name not in listed.stdout


_ANOTHER_RUN = """
from tests.hosts.network import hosts
with hosts(2) as made:
    print(made[0].name, flush=True)
    input()
"""


def another_run() -> tuple["subprocess.Popen[str]", str]:
    """A process that has made hosts, and the name of one of them."""
    command = [sys.executable, "-c", _ANOTHER_RUN]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def made_now() -> str:
    return subprocess.check_output(["ip", "netns", "list"], text=True)


def test_a_run_leaves_the_hosts_of_others_alone_until_they_have_ended() -> None:
    process, theirs = another_run()
    with process, hosts(1) as [own]:
        assert theirs in made_now()  # making hosts has removed what others have left
        remove_left_overs()
        assert theirs in made_now() and own.name in made_now()
        process.kill()
        process.wait(timeout=10)
        remove_left_overs()
        assert theirs not in made_now() and own.name in made_now()


def test_several_runs_remove_the_same_left_overs_at_once() -> None:
    killed = [another_run() for _ in range(3)]
    for process, _ in killed:
        process.kill()
        process.communicate(timeout=10)
    command = [sys.executable, "-c", "from tests.hosts.network import *; remove_left_overs()"]
    runs = [subprocess.Popen(command, cwd=ROOT) for _ in range(4)]
    assert [run.wait(timeout=60) for run in runs] == [0] * len(runs)
    assert not any(name in made_now() for _, name in killed)
