"""What a stranger says that begins as UCX's peers do: `rig.stranger` runs this.

    python -m tests.hosts.ucx HOST:PORT...

UCX knows its peers by a number that is the same everywhere. It takes what follows from them as it
comes, so each of these messages makes it use an address of the sender's choice.
"""

import contextlib
import itertools
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from tests.hosts.network import Host
from tests.process.command import ROOT

_PEER = (0xCAFEBABE12345678).to_bytes(8, "little")
#: Numbers of UCX's messages: a step of a rendezvous, and remote memory accesses.
_KINDS = (10, 16, 17, 18)
_NOWHERE = b"\xee" * 60
_PAUSE_S = 0.2
_SPOKEN_S = 60.0


def message(kind: int) -> bytes:
    """The number, and the header and the body of one message."""
    return _PEER + bytes([kind]) + len(_NOWHERE).to_bytes(4, "little") + _NOWHERE


def speak_ucx(stranger: Host, places: Sequence[tuple[str, int]]) -> None:
    """Raises AssertionError when nothing listens there."""
    command = [
        sys.executable,
        "-m",
        "tests.hosts.ucx",
        *(f"{host}:{port}" for host, port in places),
    ]
    process = stranger.start(command, subprocess.DEVNULL, cwd=ROOT)
    assert process.wait(timeout=_SPOKEN_S) == 0, places


def main() -> None:
    told: set[str] = set()
    with contextlib.ExitStack() as stack:
        for place, kind in itertools.product(sys.argv[1:], _KINDS):
            host, _, port = place.rpartition(":")
            try:
                connection = socket.create_connection((host, int(port)), timeout=5)
                stack.enter_context(connection).sendall(message(kind))
            except OSError:
                if host not in told:
                    raise
                continue  # its process has ended
            told.add(host)
            time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
