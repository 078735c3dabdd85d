"""Asks the supervisor of a graph on this host, over the Unix socket in its state directory."""

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

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

_encode = msgspec.json.Encoder().encode
_decode_reply = msgspec.json.Decoder(SupervisorReply).decode


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


class SupervisorClient:
    """Async context manager: one connection. Requests are answered one after another.

    state_dir: of the graph. timeout_s: of connecting, and of each request.
    """

    def __init__(self, state_dir: Path, timeout_s: float = 5.0):
        self._path = state_dir / SUPERVISOR_SOCKET
        self._timeout_s = timeout_s
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aenter__(self) -> Self:
        """Raises Unavailable when no supervisor listens."""
        try:
            with short_address(self._path) as address:
                async with asyncio.timeout(self._timeout_s):
                    self._streams = await asyncio.open_unix_connection(
                        address, limit=MAX_LINE_BYTES
                    )
        except (OSError, TimeoutError) as exc:
            why = getattr(exc, "strerror", None) or "no answer"
            raise Unavailable(f"no supervisor listens at {self._path}: {why}") from exc
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._streams is not None:
            self._streams[1].close()
            # A connection that the supervisor has broken is as closed as any other.
            with contextlib.suppress(OSError):
                await self._streams[1].wait_closed()

    async def ask(self, request: SupervisorRequest) -> SupervisorReply:
        """The reply, also when it is a refusal.

        Raises Unavailable when the supervisor has disconnected, DeadlineExceeded, or
        ProtocolError. Then the connection cannot be used any more, and an order may or may not
        have been taken.
        """
        if self._streams is None:
            raise Unavailable("not connected to the supervisor")
        reader, writer = self._streams
        try:
            async with asyncio.timeout(self._timeout_s):
                writer.write(_encode(request) + b"\n")
                await writer.drain()
                line = await reader.readline()
        except TimeoutError as exc:
            raise DeadlineExceeded("the supervisor", self._timeout_s) from exc
        except OSError as exc:
            raise Unavailable(f"the supervisor has disconnected: {exc}") from exc
        except ValueError as exc:  # asyncio's error for a line over the limit
            raise ProtocolError(f"the supervisor's reply is too long: {exc}") from exc
        if not line.endswith(b"\n"):
            raise Unavailable("the supervisor has disconnected")
        try:
            return _decode_reply(line)
        except msgspec.DecodeError as exc:
            raise ProtocolError(f"not a reply of a supervisor: {exc}") from exc

    async def order(self, request: SupervisorRequest) -> SupervisorReply:
        """As `ask`, for what the supervisor has accepted.

        Raises Unavailable also when there was another order since `Want.version`, and Refused when
        this one is not possible.
        """
        reply = await self.ask(request)
        if reply.stale:
            raise Unavailable(f"another process has given the supervisor orders: {reply.error}")
        if reply.error:
            raise Refused(reply.error, elsewhere=False)
        return reply
