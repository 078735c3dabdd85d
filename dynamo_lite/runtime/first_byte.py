"""A deadline for the first byte on a new connection, which HTTP servers' libraries do not have."""

import asyncio
from typing import cast

#: Clients that open connections in advance use them sooner, or open others in their place. Without
#: a limit connections that nobody uses would hold the process's file descriptors for good.
FIRST_BYTE_S = 30.0


class FirstByteDeadline(asyncio.Protocol):
    """Base class in front of a library's protocol. With TLS the handshake, which has a timeout of
    its own, comes before."""

    _first_byte: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        abort = cast("asyncio.Transport", transport).abort
        self._first_byte = asyncio.get_running_loop().call_later(FIRST_BYTE_S, abort)

    def data_received(self, data: bytes) -> None:
        self._in_time()
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        # aiohttp's type is the wider one.
        self._in_time()
        super().connection_lost(cast("Exception | None", exc))

    def _in_time(self) -> None:
        if self._first_byte is not None:
            self._first_byte.cancel()
            self._first_byte = None
