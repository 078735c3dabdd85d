"""Operating-system side of child processes: process groups, programs that answer, free ports.

Every process that a graph starts ends when its parent ends, and no member of its process
group outlives it.
"""

import asyncio
import contextlib
import errno
import logging
import os
import random
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.address import redact
from dynamo_lite.runtime.process.death_signal import death_signal_hook

logger = logging.getLogger(__name__)

#: Below Linux' usual range for outgoing connections.
_PORTS = range(16384, 32768)
#: How long the killed rest of a process group may take to disappear.
_SWEEP_TIMEOUT_S = 2.0


def signal_group(group: int, sig: int) -> bool:
    """Signals a process group. Returns whether the group had a member."""
    try:
        os.killpg(group, sig)
    except (ProcessLookupError, PermissionError):  # another user's group has the number by now
        return False
    return True


def is_alive(pid: int) -> bool:
    """Whether a process with this id exists on this host and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def start_group(
    command: Sequence[str], death: int = signal.SIGTERM, **options: Any
) -> asyncio.subprocess.Process:
    """Starts a program that leads a process group, and gets the signal `death` when this process
    ends. options: of `asyncio.create_subprocess_exec`. Raises OSError.

    Ctrl-C in a terminal reaches only this process, which then ends the program.
    """
    return await asyncio.create_subprocess_exec(
        *command, start_new_session=True, preexec_fn=death_signal_hook(death), **options
    )


def terminate(process: asyncio.subprocess.Process) -> None:
    """SIGTERM to the program alone, which may be frozen: it ends its own processes in order."""
    # `process.send_signal` would reap the process before asyncio does.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
            os.kill(process.pid, signal.SIGCONT)


async def end_group(process: asyncio.subprocess.Process, timeout_s: float) -> None:
    """Ends the program, after `timeout_s` with SIGKILL, and what is left of its group."""
    try:
        terminate(process)
        async with asyncio.timeout(timeout_s):
            await process.wait()
    except TimeoutError:
        if timeout_s:
            logger.warning("process %d: no exit within %g s: killed", process.pid, timeout_s)
    finally:
        left = signal_group(process.pid, signal.SIGKILL)
        await process.wait()
        deadline = time.monotonic() + _SWEEP_TIMEOUT_S
        while left and time.monotonic() < deadline:
            # Nothing reports when a process group becomes empty, so this polls.
            await asyncio.sleep(0.01)
            left = signal_group(process.pid, 0)


async def output_of(
    what: str, command: Sequence[str], env: Mapping[str, str], question: bytes, timeout_s: float
) -> bytes:
    """What a program writes that reads `question`. It has ended when this call ends.

    Raises StartupError, which begins with `what`, if it fails or takes too long.
    """
    pipe = asyncio.subprocess.PIPE
    try:
        process = await start_group(
            command, signal.SIGKILL, stdin=pipe, stdout=pipe, stderr=pipe, env=env
        )
    except OSError as exc:
        raise StartupError(f"{what}: cannot start its process: {exc}") from exc
    try:
        async with asyncio.timeout(timeout_s):
            answer, errors = await process.communicate(question)
    except TimeoutError as exc:
        raise StartupError(f"{what}: timeout after {timeout_s:g} s") from exc
    finally:
        await end_group(process, 0.0)
    if process.returncode != 0:
        lines = errors.decode(errors="replace").strip().splitlines() or ["no message"]
        raise StartupError(f"{what}: {redact(lines[-1])}")
    return answer


def free_port() -> int:
    """A TCP port of loopback that no socket has now. It may be taken before it is used: be ready to
    retry.

    It is outside Linux' usual range for outgoing connections. So a restarted server finds its port
    free although clients tried to connect meanwhile.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        # No socket has the port, also none that does not listen.
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(errno.EADDRINUSE, "no free port")
