"""TCP as asyncio shows it: transports and servers on simulated connections."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation.network.connection import End

if TYPE_CHECKING:
    from tests.simulation.network.network import Network

#: What the kernels of both sides hold before a writer's buffer fills.
_WINDOW_BYTES = 256 << 10
_HIGH_WATER_BYTES = 64 << 10
_LOW_WATER_BYTES = 16 << 10

Address = tuple[str, int]
ProtocolFactory = Callable[[], asyncio.BaseProtocol]


class StreamTransport(asyncio.Transport):
    """States: open -> closing (what is buffered is still sent) -> closed."""

    def __init__(
        self, end: End, protocol: asyncio.BaseProtocol, sockname: Address, peername: Address
    ):
        super().__init__({"sockname": sockname, "peername": peername, "socket": None})
        self._end = end
        self._loop = end.network.loop
        self._protocol: Any = protocol
        self._unread = 0  # bytes that the peer has not taken yet
        self._closing = False
        self._lost = False
        self._writing_paused = False

    def open(self) -> "StreamTransport":
        """Tells the protocol that it is connected, and lets data in."""
        self._protocol.connection_made(self)
        self._end.start(self._received, self._broken)
        return self

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def is_closing(self) -> bool:
        # Also called when the StreamWriter of a dead process is collected.
        return self._closing or self._loop.is_closed()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing or not data:
            return
        data = bytes(data)
        self._unread += len(data)
        self._end.send((self, data))
        if self._unread > _WINDOW_BYTES + _HIGH_WATER_BYTES and not self._writing_paused:
            self._writing_paused = True
            self._protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return max(0, self._unread - _WINDOW_BYTES)

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            if self.get_write_buffer_size() == 0:
                self._finish()

    def abort(self) -> None:
        self._closing = True
        if self._end.is_open:
            self._end.abort()
        self._lose(None)

    def taken(self, size: int) -> None:
        """The peer has read `size` bytes."""
        self._unread -= size
        if self._lost or not (self._closing or self._writing_paused):
            return
        unsent = self.get_write_buffer_size()
        if self._closing:
            if unsent == 0 and self._end.is_open:
                self._soon(self._finish)
        elif self._writing_paused and unsent <= _LOW_WATER_BYTES:
            self._writing_paused = False
            self._soon(self._resume_writing)

    def _soon(self, function: Callable[..., None], *args: Any) -> None:
        self._loop.call_soon(function, *args, context=self._end.context)

    def _resume_writing(self) -> None:
        if not self._lost:
            self._protocol.resume_writing()

    def _received(self, item: "tuple[StreamTransport, bytes]") -> None:
        sender, data = item
        sender.taken(len(data))
        if not self._closing:
            self._protocol.data_received(data)

    def _broken(self, why: str) -> None:
        if why:
            self._closing = True
            self._lose(ConnectionResetError(why) if "reset" in why else TimeoutError(why))
            return
        if not self._closing:
            self._protocol.eof_received()
        self._closing = True
        self._lose(None)

    def _finish(self) -> None:
        if self._end.is_open:
            self._end.close()
        self._lose(None)

    def _lose(self, exc: Exception | None) -> None:
        if not self._lost:
            self._lost = True
            self._soon(self._leave, exc)

    def _leave(self, exc: Exception | None) -> None:
        protocol, self._protocol = self._protocol, None
        protocol.connection_lost(exc)


class _Socket:
    """As much of a listening socket as asyncio's servers show."""

    def __init__(self, address: Address):
        self._address = address

    def getsockname(self) -> Address:
        return self._address


class StreamServer(asyncio.AbstractServer):
    """A listening TCP socket of the process that made it; open connections outlive it."""

    def __init__(self, network: "Network", factory: ProtocolFactory, host: str, port: int):
        self._factory = factory
        self._listener = network.listen(network.loop.current_process(), self._accept, port)
        self._address = (host, self._listener.port)
        self._serving = True

    @property
    def sockets(self) -> tuple[_Socket, ...]:
        return (_Socket(self._address),) if self._serving else ()

    def close(self) -> None:
        self._serving = False
        self._listener.close()

    async def start_serving(self) -> None:
        """It has begun already."""

    async def wait_closed(self) -> None:
        return

    def _accept(self, end: End) -> None:
        peer = (end.peer.process.name, 1)
        StreamTransport(end, self._factory(), self._address, peer).open()
