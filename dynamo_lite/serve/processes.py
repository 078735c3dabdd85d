"""Operating-system side of child processes: process groups, programs that answer, free ports.

Every process that a graph starts ends when its parent ends, and no member of its process
group outlives it.
"""

import asyncio
import errno
import os
import random
import signal
import socket
from collections.abc import Mapping, Sequence

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.address import redact
from dynamo_lite.runtime.process.death_signal import death_signal_hook

_PORTS = 16384
_PORT_TRIES = 32


def signal_group(group: int, sig: int) -> bool:
    """Signals a process group. Returns whether the group had a member."""
    try:
        os.killpg(group, sig)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def is_alive(pid: int) -> bool:
    """Whether a process with this id exists on this host and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        if os.path.isdir("/proc/self"):
            return False
    except OSError:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


async def output_of(
    what: str, command: Sequence[str], env: Mapping[str, str], question: bytes, timeout_s: float
) -> bytes:
    """What a program writes that reads `question`. It has ended when this call ends.

    Raises StartupError, which begins with `what`, if it fails or takes too long.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=env,
        # Ctrl-C in a terminal must reach only this process, which then ends the program.
        start_new_session=True,
        preexec_fn=death_signal_hook(signal.SIGKILL),
    )
    try:
        async with asyncio.timeout(timeout_s):
            answer, errors = await process.communicate(question)
    except TimeoutError as exc:
        raise StartupError(f"{what}: timeout after {timeout_s:g} s") from exc
    finally:
        if process.returncode is None:
            signal_group(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode != 0:
        lines = errors.decode(errors="replace").strip().splitlines() or ["no message"]
        raise StartupError(f"{what}: {redact(lines[-1])}")
    return answer


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that no socket has now. It may be taken before it is used: be ready to retry.

    It is outside the range for outgoing connections. So a restarted server finds its port
    free although clients tried to connect meanwhile.
    """
    end = _first_outgoing_port()
    for _ in range(_PORT_TRIES):
        port = random.randrange(end - _PORTS, end) if end > _PORTS + 1024 else 0
        if port and _is_unused(host, port):
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _is_unused(host: str, port: int) -> bool:
    """Whether no socket has the port, also none that does not listen."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _first_outgoing_port() -> int:
    """Start of the port range for outgoing connections; 0 if unknown."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as limits:
            return int(limits.read().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def can_listen(host: str, port: int) -> bool:
    """Whether a server can listen on this address now. Raises OSError for an unknown host."""
    family, kind, proto, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, proto) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as exc:
            if exc.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True
