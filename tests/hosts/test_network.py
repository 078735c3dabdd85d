"""The hosts themselves: what is cut is silent, what is healed works, and nothing is left."""

import subprocess
import sys

import pytest

from tests.hosts.network import Host, hosts, unavailable
from tests.lacking import lacking

pytestmark = pytest.mark.heavy


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
    if why := unavailable():
        lacking(why)
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
