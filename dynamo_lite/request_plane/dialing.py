"""How a frontend opens a connection to a worker: plain on loopback, else with TLS on both sides."""

import asyncio
import ssl

from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import DeadlineExceeded, ProtocolError, Unavailable
from dynamo_lite.protocol.generate import Hello
from dynamo_lite.protocol.records import EndpointTransport
from dynamo_lite.request_plane.framing import STALL_TIMEOUT_S, FrameConnection, frame, parse_address
from dynamo_lite.runtime.address import is_loopback
from dynamo_lite.runtime.certificates import Certificates
from dynamo_lite.runtime.drops import OnDrop

#: Timeout of the TCP connection to a worker and of its Welcome.
_CONNECT_TIMEOUT_S = 2.0


class Dialer:
    """client_id, certificates, component: see `RemoteGenerateClient`. on_drop: called with
    "certificate" for a worker that is refused, or that refuses this process."""

    def __init__(
        self, client_id: str, certificates: Certificates | None, component: str, on_drop: OnDrop
    ):
        self._hello = frame(encode(Hello(client_id=client_id)))
        self._certificates, self._component = certificates, component
        self._on_drop = on_drop

    async def open(self, connection: FrameConnection, transport: EndpointTransport) -> None:
        """Connects, and waits for the Welcome. Raises Unavailable or DeadlineExceeded."""
        loop, address = asyncio.get_running_loop(), transport.stream or ""
        welcomed = False
        try:
            host, port = parse_address(address)
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                tls = self._context(host, transport)
                await loop.create_connection(
                    lambda: connection,
                    host,
                    port,
                    ssl=tls,
                    ssl_shutdown_timeout=None if tls is None else STALL_TIMEOUT_S,
                )
                if tls is not None:
                    self._check_worker(connection)
                connection.send(self._hello)
                ends = {connection.greeted, connection.closed}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            welcomed = connection.greeted.done()
        except TimeoutError as exc:
            what = f"connecting to the worker at {address}"
            raise DeadlineExceeded(what, _CONNECT_TIMEOUT_S) from exc
        except (OSError, ValueError, ProtocolError) as exc:  # ValueError: an impossible host name
            why = self._explained(exc) or exc
            raise Unavailable(f"cannot reach the worker at {address}: {why}") from exc
        finally:
            if not welcomed:  # also when a cancel or the timeout comes together with the Welcome
                connection.abort("no Welcome from the worker")
        if connection.closed.done():
            lost = connection.closed.result()
            why = self._explained(lost) or lost
            raise Unavailable(f"the worker at {address} disconnected: {why}")

    def _context(self, host: str, transport: EndpointTransport) -> ssl.SSLContext | None:
        """None for plain TCP. Raises ProtocolError where requests would be sent in the clear."""
        if not transport.tls:
            if not is_loopback(host):
                raise ProtocolError("it is on another host, and its record says: without TLS")
            return None
        if self._certificates is None:
            raise ProtocolError("it wants TLS, and this process has no certificates")
        return self._certificates.client()

    def _check_worker(self, connection: FrameConnection) -> None:
        """Raises ProtocolError unless the worker is of the right component of this graph."""
        assert self._certificates is not None
        why = self._certificates.refusal(connection.ssl_object, self._component)
        if why:
            self._on_drop("certificate")
            raise ProtocolError(why)

    def _explained(self, failure: Exception | str) -> str:
        """What is wrong with a certificate; empty if nothing is. It is counted."""
        why = "" if self._certificates is None else self._certificates.explained(failure)
        if why:
            self._on_drop("certificate")
        return why
