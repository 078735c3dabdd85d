"""A NATS client that requires TLS.

A NATS server begins in plain text and announces there whether it wants TLS. nats-py follows
that announcement, so a man in the middle could make it send the password in plain text.
"""

import logging
from typing import Any

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


class _TlsTransport(LoopTransport):
    """Records whether the TLS handshake has succeeded."""

    secured = False

    async def connect_tls(self, *args: Any, **options: Any) -> None:
        await super().connect_tls(*args, **options)
        # `start_tls` does not tell the protocol, which would keep a connection open that the server
        # has ended, and the loop would log each time that TLS cannot do that.
        writer: Any = self._io_writer
        writer._protocol._over_ssl = True
        self.secured = True

    async def wait_closed(self) -> None:
        # After a failed handshake asyncio would never report that the connection is closed.
        if self.secured:
            await super().wait_closed()
