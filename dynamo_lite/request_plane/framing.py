"""The TCP connections between frontends and workers: frames, their parser, and one connection.

A frame is a 4-byte big-endian length followed by that many bytes of msgpack. This
module owns framing, back-pressure and liveness; its users own the meaning of the frames.
Malformed bytes end their connection and nothing else.
"""

import asyncio
import logging
import ssl
from abc import ABC, abstractmethod
from typing import cast

from dynamo_lite.protocol.codec import MAX_MESSAGE_BYTES
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.runtime.address import host_port
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.runtime.lost_host import notice_a_lost_host

logger = logging.getLogger(__name__)

_HEADER_BYTES = 4

#: A connection with more unsent bytes than this is closed.
MAX_UNSENT_BYTES = 64 << 20
#: The kernel closes a connection whose peer reads nothing for this long while bytes are unsent, or
#: whose peer's host acknowledges nothing; otherwise it would repeat the bytes for 15 minutes.
STALL_TIMEOUT_S = 20.0
#: The first frame must arrive within this time.
FIRST_FRAME_TIMEOUT_S = 5.0


def frame(payload: bytes, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """Raises ProtocolError when `payload` is empty or over `max_bytes`."""
    if not 0 < len(payload) <= max_bytes:
        raise ProtocolError(f"frame of {len(payload)} bytes (1 to {max_bytes} allowed)")
    return len(payload).to_bytes(_HEADER_BYTES, "big") + payload


def parse_address(address: str) -> tuple[str, int]:
    """Raises ProtocolError when `address` is not HOST:PORT."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ProtocolError(f"not a HOST:PORT address: {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


class FrameParser:
    """Splits a byte stream into payloads; buffers at most one incomplete frame.

    first_max_bytes: limit on the first payload. max_bytes: limit on all others.
    """

    def __init__(
        self, first_max_bytes: int = MAX_MESSAGE_BYTES, max_bytes: int = MAX_MESSAGE_BYTES
    ):
        self._limit, self._max_bytes = first_max_bytes, max_bytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the payloads that `data` completes, in order.

        Raises ProtocolError at an invalid frame length. The parser must not be used after that.
        """
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted(self._rest, 0):
                return []
            data = bytes(self._rest)
            self._rest = bytearray()
        payloads: list[bytes] = []
        at = 0
        while (end := at + self._wanted(data, at)) <= len(data):
            payloads.append(data[at + _HEADER_BYTES : end])
            at, self._limit = end, self._max_bytes
        self._rest += data[at:]
        return payloads

    def _wanted(self, data: bytes | bytearray, at: int) -> int:
        """Length in bytes of the frame at `at`, with its header, as far as it is known."""
        if len(data) - at < _HEADER_BYTES:
            return _HEADER_BYTES
        length = int.from_bytes(data[at : at + _HEADER_BYTES], "big")
        if not 0 < length <= self._limit:
            raise ProtocolError(f"frame length {length} (1 to {self._limit} allowed)")
        return _HEADER_BYTES + length


class FrameConnection(asyncio.Protocol, ABC):
    """One TCP connection; each end has a class of its own. `send` never waits; a peer that does not
    read is disconnected.

    first_max_bytes, max_bytes: see `FrameParser`. on_drop: called with "stream" when a frame is
    malformed or unexpected. log_limit: of all connections that log together.
    States: new -> open -> closed; `repr` shows the state and the unsent bytes.
    """

    def __init__(
        self,
        *,
        first_max_bytes: int = MAX_MESSAGE_BYTES,
        max_bytes: int = MAX_MESSAGE_BYTES,
        on_drop: OnDrop = uncounted,
        log_limit: LogLimit | None = None,
    ):
        self._on_drop = on_drop
        self._log_limit = log_limit or LogLimit()
        self._parser = FrameParser(first_max_bytes, max_bytes)
        self._transport: asyncio.Transport | None = None
        #: Until the first frame.
        self._timer: asyncio.TimerHandle | None = None
        self._frames_received = 0
        #: None for plain TCP.
        self.ssl_object: ssl.SSLObject | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        loop = asyncio.get_running_loop()
        #: Done when the first frame has come.
        self.greeted: asyncio.Future[None] = loop.create_future()
        #: Done when the connection is lost, or could not be made; the result is the reason.
        self.closed: asyncio.Future[str] = loop.create_future()
        #: The first reason of `close` or `abort`.
        self._why = ""
        #: Address of the peer's host, and with its port.
        self.peer_host = self.peer = "?"

    @abstractmethod
    def frame_received(self, payload: bytes) -> None:
        """Must not block. May raise ProtocolError, which closes the connection."""

    @abstractmethod
    def connection_closed(self, why: str) -> None:
        """Called exactly once per connection that was made, unless `closed` was set before."""

    def __repr__(self) -> str:
        state = "closed" if self.closed.done() else "open" if self._transport else "new"
        return f"<FrameConnection {state} peer={self.peer} unsent={self._unsent()}>"

    @property
    def is_open(self) -> bool:
        """Whether what is sent may arrive."""
        transport, lost = self._transport, self.closed.done()
        return transport is not None and not lost and not transport.is_closing()

    def send(self, data: bytes) -> None:
        """Queues whole frames. They are dropped when the connection is closed."""
        if self.closed.done() or self._transport is None:
            return
        self._transport.write(data)
        if self._unsent() > MAX_UNSENT_BYTES:
            self.abort(f"the peer is too slow: {self._unsent()} bytes are unread")

    async def wait_writable(self) -> None:
        """Returns when the write buffer is not full, or the connection is closed."""
        await self._writable.wait()

    def close(self, why: str) -> None:
        """Sends what is queued, then closes. A peer that does not read is disconnected."""
        if self._transport is None or self.closed.done():
            return
        self._why = self._why or why
        self._transport.close()

    def abort(self, why: str) -> None:
        """Closes at once. Queued frames are lost."""
        if self._transport is not None and not self.closed.done():
            self._why = self._why or why
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.ssl_object = transport.get_extra_info("ssl_object")
        peer = transport.get_extra_info("peername")
        if peer:
            self.peer_host, self.peer = peer[0], host_port(peer[0], peer[1])
        notice_a_lost_host(transport.get_extra_info("socket"), STALL_TIMEOUT_S)
        self._timer = asyncio.get_running_loop().call_later(
            FIRST_FRAME_TIMEOUT_S, self.abort, f"no frame within {FIRST_FRAME_TIMEOUT_S:g} s"
        )

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._parser.feed(data):
                self._frames_received += 1
                self.frame_received(payload)
                if not self.greeted.done():
                    self.greeted.set_result(None)
                    self._cancel_timer()
                if self._transport is None or self._transport.is_closing():
                    return
        except ProtocolError as exc:
            text = "stream with %s: malformed frame, disconnecting: %s"
            self._log_limit.log(logger, text, self.peer, exc)
            self._on_drop("stream")
            self.abort(str(exc))

    def connection_lost(self, exc: Exception | None) -> None:
        self._writable.set()
        self._cancel_timer()
        if not self.closed.done():
            lost = f"connection lost: {exc}" if exc else "the peer closed the connection"
            self.closed.set_result(self._why or lost)
            self.connection_closed(self.closed.result())

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    @property
    def room_bytes(self) -> int:
        """How many bytes may still be queued before the peer counts as too slow."""
        return MAX_UNSENT_BYTES - self._unsent()

    def _unsent(self) -> int:
        transport = self._transport
        if transport is None or self.closed.done() or (self.ssl_object and transport.is_closing()):
            return 0  # a closing TLS transport cannot report it
        return transport.get_write_buffer_size()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
