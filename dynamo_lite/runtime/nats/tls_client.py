"""A NATS client that insists on TLS.

NATS servers begin in plain text and say there whether they want TLS. nats-py does
as they say, so anybody between could ask for the password in plain text.
"""

import ssl
from urllib.parse import ParseResult

from nats import errors
from nats.aio.transport import TcpTransport

from dynamo_lite.runtime.nats.client import PersistentClient
from dynamo_lite.runtime.tls import TlsFiles


class TlsMismatch(errors.Error):
    """Server and URL disagree about TLS: asking again is of no use."""


class TlsClient(PersistentClient):
    """Raises TlsMismatch, or has it reported, before anything is told to a wrong server."""

    def __init__(self, files: TlsFiles):
        super().__init__()
        self._files = files

    def _new_transport(self) -> TcpTransport:
        return _TlsTransport()

    def _connect_command(self) -> bytes:
        if not isinstance(self._transport, _TlsTransport) or not self._transport.secured:
            raise TlsMismatch("it does not offer TLS; write nats:// if that is right")
        if self._server_info.get("tls_verify") and self._files.cert is None:
            raise TlsMismatch("it asks for a client's certificate: ?cert=FILE&key=FILE")
        return super()._connect_command()


class _TlsTransport(TcpTransport):
    """Knows whether the handshake was made."""

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
        await super().connect_tls(uri, ssl_context, buffer_size, connect_timeout)
        self.secured = True

    async def wait_closed(self) -> None:
        # After a failed handshake nobody would ever say that the connection is closed.
        if self.secured:
            await super().wait_closed()
