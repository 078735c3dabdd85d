"""The supervisor's Unix socket: counts, and the numbers of processes that are wanted.

A process that may open the socket (0600) may stop processes of the graph, but not start other
programs: an order names a service of the graph and nothing else.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

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


@contextlib.asynccontextmanager
async def supervisor_socket(directory: Path, supervisor: Supervisor) -> AsyncIterator[None]:
    """The socket in the locked state directory. Raises StartupError when it cannot be made."""
    path, orders = directory / SUPERVISOR_SOCKET, Orders(supervisor.counts)
    async with OwnedTasks() as tasks:

        def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.start(_serve(reader, writer, orders, supervisor.want), name="connection")

        options = {"limit": MAX_LINE_BYTES, "start_serving": False}
        try:
            # It replaces the socket that a killed supervisor has left.
            with short_address(path) as address:
                server = await asyncio.start_unix_server(on_connection, address, **options)
            # No client can connect before it listens.
            path.chmod(0o600)
            await server.start_serving()
        except OSError as exc:
            raise StartupError(f"cannot make the socket {path}: {exc.strerror}") from exc
        try:
            yield
        finally:
            server.close()
            path.unlink(missing_ok=True)


async def _serve(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    orders: Orders,
    carry_out: Callable[[Want], object],
) -> None:
    """Answers one request. A client that is slow or sends too long a line gets no reply."""
    gone = (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
    with contextlib.suppress(*gone), contextlib.closing(writer):
        async with asyncio.timeout(_TIMEOUT_S):
            line = await reader.readuntil(b"\n")
            try:
                reply = orders.answer(_decode_request(line), carry_out)
            except msgspec.DecodeError as exc:
                reply = orders.reply(f"not a request: {exc}; accepted: counts, want")
            writer.write(_encode(reply) + b"\n")
            await writer.drain()
