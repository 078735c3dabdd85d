"""TLS towards NATS and etcd: the files that a server URL names, checked and loaded."""

import re
import ssl
from dataclasses import dataclass
from pathlib import Path

from dynamo_lite.protocol.errors import ConfigError


@dataclass(frozen=True)
class TlsFiles:
    """PEM files. Without `ca` the system's authorities are trusted; `cert` and `key` are
    the client's own, both or none."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """For a client that checks the server's certificate and name.

        Raises ConfigError when a file cannot be read or is not what it should be.
        """
        for name, path in (("ca", self.ca), ("cert", self.cert), ("key", self.key)):
            _check_readable(name, path)
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except ssl.SSLError as exc:
            message = f"ca={self.ca} is not a PEM file of certificates; name the authority's."
            raise ConfigError([message]) from exc
        if self.cert is not None:
            try:
                # An encrypted key must fail: there is nobody to ask for its password.
                context.load_cert_chain(self.cert, self.key, password=lambda: "")
            except ssl.SSLError as exc:
                message = f"cert={self.cert} and key={self.key} are not a matching PEM pair"
                raise ConfigError([f"{message} with an unencrypted key."]) from exc
        return context

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Authorities, client key and client certificate, for gRPC. Raises OSError."""
        ca = self.ca or ssl.get_default_verify_paths().cafile
        return _read(ca), _read(self.key), _read(self.cert)


def _check_readable(name: str, path: Path | None) -> None:
    try:
        _read(path)
    except OSError as exc:
        message = f"{name}={path} cannot be read ({exc.strerror}); name an existing PEM file."
        raise ConfigError([message]) from exc


def _read(path: Path | str | None) -> bytes | None:
    return Path(path).read_bytes() if path is not None else None


#: What OpenSSL, BoringSSL and gRPC call the ways in which a handshake is refused.
_REFUSALS = (
    (r"(host ?name|ip address) (mismatch|verification)", "its certificate is for another name"),
    (r"CERTIFICATE_VERIFY_FAILED", "its certificate is not trusted; name its authority: ?ca=FILE"),
    (
        r"ALERT_\w*(CERTIFICATE|UNKNOWN_CA|ACCESS_DENIED)",
        "it does not accept this client's certificate; name one: ?cert=FILE&key=FILE",
    ),
    (r"WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE|HTTP_REQUEST", "it does not speak TLS"),
)


def tls_refusal(text: str) -> str | None:
    """What to do about a failed handshake, from a library's words for it; None when
    `text` is about something else, that may pass."""
    for pattern, meaning in _REFUSALS:
        if re.search(pattern, text, re.IGNORECASE):
            return meaning
    return None
