"""A NATS client that requires TLS.

A NATS server begins in plain text and announces there whether it wants TLS. nats-py follows
that announcement, so a man in the middle could make it send the password in plain text.
"""

import asyncio
import logging
import ssl
from urllib.parse import ParseResult

from nats import errors

from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.runtime.nats.client import LoopTransport, PersistentClient
from dynamo_lite.runtime.tls import TlsFiles

logger = logging.getLogger(__name__)


class TlsMismatch(errors.Error):
    """Server and URL disagree about TLS: a retry is of no use."""


class TlsClient(PersistentClient):
    """Raises or reports TlsMismatch before it sends any credentials to a wrong server. Each new
    connection reads the files again; while they cannot be used, what was read before is."""

    def __init__(self, files: TlsFiles):
        super().__init__()
        self._files, self._log_limit = files, LogLimit(60.0)

    def _new_transport(self) -> LoopTransport:
        try:
            self.options["tls"] = self._files.context()
        except ConfigError as exc:
            self._log_limit.log(logger, "%s What was read before stays in use.", exc)
        return _TlsTransport()

    def _connect_command(self) -> bytes:
        if not isinstance(self._transport, _TlsTransport) or not self._transport.secured:
            raise TlsMismatch("it does not offer TLS; write nats:// if that is intended")
        if self._server_info.get("tls_verify") and self._files.cert is None:
            raise TlsMismatch("it requires a client certificate: ?cert=FILE&key=FILE")
        return super()._connect_command()


class _TlsProtocol(asyncio.StreamReaderProtocol):
    """StreamReaderProtocol keeps a connection open that the server has ended, unless it was made
    with TLS. After `start_tls` it does not know of TLS, and the loop logs that it cannot do that:
    at every end of a connection."""

    def eof_received(self) -> bool:
        super().eof_received()
        return False


class _TlsTransport(LoopTransport):
    """Records whether the TLS handshake has succeeded."""

    def __init__(self) -> None:
        super().__init__()
        self.secured = False

    async def connect_tls(
        self,
        uri: str | ParseResult,
        ssl_context: ssl.SSLContext,
        buffer_size: int,
        connect_timeout: int,
    ) -> None:
        assert self._io_writer is not None, "connect first"
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        protocol = _TlsProtocol(reader)
        async with asyncio.timeout(connect_timeout):
            transport = await loop.start_tls(
                self._io_writer.transport,
                protocol,
                ssl_context,
                server_hostname=uri if isinstance(uri, str) else uri.hostname,
            )
        assert transport is not None
        self._io_reader = reader
        self._io_writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        self.secured = True

    async def wait_closed(self) -> None:
        # After a failed handshake asyncio would never report that the connection is closed.
        if self.secured:
            await super().wait_closed()
