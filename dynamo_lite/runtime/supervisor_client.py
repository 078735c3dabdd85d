"""Asks the supervisor of a graph on this host, over the Unix socket in its state directory."""

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from dynamo_lite.protocol.errors import (
    DeadlineExceeded,
    ProtocolError,
    Refused,
    Unavailable,
)
from dynamo_lite.protocol.planner import (
    MAX_LINE_BYTES,
    SUPERVISOR_SOCKET,
    SupervisorReply,
    SupervisorRequest,
)

#: The kernel's limit on a Unix socket's address, with its last zero byte.
_ADDRESS_BYTES = 108


@contextlib.contextmanager
def short_address(path: Path) -> Iterator[str]:
    """An address of the socket `path` that the kernel accepts, also where the path is too long.

    Valid while the context is open. Raises OSError when the folder does not exist.
    """
    if len(os.fsencode(path)) < _ADDRESS_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


async def order(
    state_dir: Path, request: SupervisorRequest, timeout_s: float = 5.0
) -> SupervisorReply:
    """The reply of the supervisor of the graph in `state_dir`.

    Raises Refused when an order is not possible; Unavailable when there was another order since
    `Want.version`, when no supervisor listens or it has disconnected; DeadlineExceeded;
    ProtocolError. After the last four an order may or may not have been taken.
    """
    path = state_dir / SUPERVISOR_SOCKET
    try:
        async with asyncio.timeout(timeout_s):
            line = await _exchange(path, msgspec.json.encode(request) + b"\n")
    except TimeoutError as exc:
        raise DeadlineExceeded("the supervisor", timeout_s) from exc
    except OSError as exc:
        why = exc.strerror or exc
        raise Unavailable(f"no supervisor listens at {path}: {why}") from exc
    except ValueError as exc:  # asyncio's error for a line over the limit
        raise ProtocolError(f"the supervisor's reply is too long: {exc}") from exc
    if not line.endswith(b"\n"):
        raise Unavailable("the supervisor has disconnected")
    try:
        reply = msgspec.json.decode(line, type=SupervisorReply)
    except msgspec.DecodeError as exc:
        raise ProtocolError(f"not a reply of a supervisor: {exc}") from exc
    if reply.stale:
        raise Unavailable(f"another process has given the supervisor orders: {reply.error}")
    if reply.error:
        raise Refused(reply.error, elsewhere=False)
    return reply


async def _exchange(path: Path, line: bytes) -> bytes:
    with short_address(path) as address:
        reader, writer = await asyncio.open_unix_connection(address, limit=MAX_LINE_BYTES)
    try:
        writer.write(line)
        await writer.drain()
        return await reader.readline()
    finally:
        writer.close()
        # A connection that the supervisor has broken is as closed as any other.
        with contextlib.suppress(OSError):
            await writer.wait_closed()
