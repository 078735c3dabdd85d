"""A NATS client that requires TLS.

A NATS server begins in plain text and announces there whether it wants TLS. nats-py follows
that announcement, so a man in the middle could make it send the password in plain text.
"""

import ssl
from urllib.parse import ParseResult

from nats import errors
from nats.aio.transport import TcpTransport

from dynamo_lite.runtime.nats.client import PersistentClient
from dynamo_lite.runtime.tls import TlsFiles


class TlsMismatch(errors.Error):
    """Server and URL disagree about TLS: a retry is of no use."""


class TlsClient(PersistentClient):
    """Raises or reports TlsMismatch before it sends any credentials to a wrong server."""

    def __init__(self, files: TlsFiles):
        super().__init__()
        self._files = files

    def _new_transport(self) -> TcpTransport:
        return _TlsTransport()

    def _connect_command(self) -> bytes:
        if not isinstance(self._transport, _TlsTransport) or not self._transport.secured:
            raise TlsMismatch("it does not offer TLS; write nats:// if that is intended")
        if self._server_info.get("tls_verify") and self._files.cert is None:
            raise TlsMismatch("it requires a client certificate: ?cert=FILE&key=FILE")
        return super()._connect_command()


class _TlsTransport(TcpTransport):
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
        await super().connect_tls(uri, ssl_context, buffer_size, connect_timeout)
        self.secured = True

    async def wait_closed(self) -> None:
        # After a failed handshake asyncio would never report that the connection is closed.
        if self.secured:
            await super().wait_closed()
