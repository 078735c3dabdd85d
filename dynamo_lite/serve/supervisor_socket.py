"""The supervisor's Unix socket: counts, and the numbers of processes that are wanted.

A process that may open the socket (0600) may stop processes of the graph, but not start other
programs: an order names a service of the graph and nothing else.
"""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec

from dynamo_lite.protocol.errors import Refused, StartupError
from dynamo_lite.protocol.planner import (
    MAX_LINE_BYTES,
    SUPERVISOR_SOCKET,
    Counts,
    RoleCounts,
    SupervisorReply,
    SupervisorRequest,
    Want,
)
from dynamo_lite.runtime.supervisor_client import short_address
from dynamo_lite.runtime.tasks import OwnedTasks
from dynamo_lite.serve.supervisor import Supervisor

#: Of one request with its reply.
_TIMEOUT_S = 10.0
#: Of an error in a reply, in characters.
_ERROR_LIMIT = 1024

_decode_request = msgspec.json.Decoder(SupervisorRequest).decode
_encode = msgspec.json.Encoder().encode


class Orders:
    """Takes an order only if it was decided on the present numbers. counts: of a supervisor's
    processes."""

    def __init__(self, counts: Callable[[], dict[str, RoleCounts]]):
        self._counts = counts
        #: How many orders there were.
        self.version = 0

    def answer(
        self, request: SupervisorRequest, carry_out: Callable[[Want], object]
    ) -> SupervisorReply:
        """carry_out: raises Refused when an order is not possible."""
        if isinstance(request, Counts):
            return self.reply()
        if request.version != self.version:
            why = f"version {request.version} is old: there were {self.version} orders"
            return self.reply(why, stale=True)
        # Also a refused order may have been carried out in part.
        self.version += 1
        try:
            carry_out(request)
        except Refused as exc:
            return self.reply(exc.reason)
        return self.reply()

    def reply(self, error: str = "", *, stale: bool = False) -> SupervisorReply:
        return SupervisorReply(
            error=error[:_ERROR_LIMIT], stale=stale, counts=self._counts(), version=self.version
        )


class SupervisorSocket:
    """Async context manager. directory: the locked state directory."""

    def __init__(self, directory: Path, supervisor: Supervisor):
        self._path = directory / SUPERVISOR_SOCKET
        self._supervisor, self._orders = supervisor, Orders(supervisor.counts)
        self._tasks = OwnedTasks()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        """Raises StartupError when the socket cannot be made."""
        options = {"limit": MAX_LINE_BYTES, "start_serving": False}
        try:
            # It replaces the socket that a killed supervisor has left.
            with short_address(self._path) as path:
                self._server = await asyncio.start_unix_server(self._on_connection, path, **options)
            # No client can connect before it listens.
            self._path.chmod(0o600)
            await self._server.start_serving()
        except OSError as exc:
            raise StartupError(f"cannot make the socket {self._path}: {exc.strerror}") from exc
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        await self._tasks.end()
        self._path.unlink(missing_ok=True)

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.start(self._serve(reader, writer), name="supervisor connection")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request. A client that is slow or sends too long a line gets no reply."""
        gone = (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
        with contextlib.suppress(*gone), contextlib.closing(writer):
            async with asyncio.timeout(_TIMEOUT_S):
                line = await reader.readuntil(b"\n")
                writer.write(_encode(self._answer(line)) + b"\n")
                await writer.drain()

    def _answer(self, line: bytes) -> SupervisorReply:
        try:
            return self._orders.answer(_decode_request(line), self._supervisor.want)
        except msgspec.DecodeError as exc:
            return self._orders.reply(f"not a request: {exc}; accepted: counts, want")
