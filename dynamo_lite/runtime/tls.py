"""TLS: checks and loads the PEM files of clients (NATS, etcd, engines) and of HTTP servers."""

import logging
import os
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from dynamo_lite.protocol.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class TlsFiles:
    """PEM files."""

    #: The trusted authorities; None for the system's.
    ca: Path | None = None
    #: The client's certificate and its key: both or neither.
    cert: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """The context of a client that checks the server's certificate and name.

        Raises ConfigError when a file cannot be read or is invalid.
        """
        for name, path in (("ca", self.ca), ("cert", self.cert), ("key", self.key)):
            read_file(name, path)
        try:
            context = ssl.create_default_context(cafile=self.ca)
            context.minimum_version = ssl.TLSVersion.TLSv1_2  # some builds of Python have none
        except ssl.SSLError as exc:
            message = f"ca={self.ca} is not a PEM file of certificates; name the authority's."
            raise ConfigError([message]) from exc
        if self.cert is not None and self.key is not None:
            load_pair(context, self.cert, self.key, "cert", "key")
        return context

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Authorities, client key and client certificate, for gRPC. Raises ConfigError when a
        file cannot be read."""
        ca = self.ca or ssl.get_default_verify_paths().cafile
        return read_file("ca", ca), read_file("key", self.key), read_file("cert", self.cert)


class Reread(Generic[T]):
    """What `make` has made of files. It is made again when they have changed; while they cannot be
    used, which is logged, what was made before stays in use. files: None if there are none."""

    def __init__(self, files: TlsFiles | None, make: Callable[[], T]):
        """Raises what `make` raises."""
        self._paths = () if files is None else (files.ca, files.cert, files.key)
        self._make = make
        self._stamps = self._look()
        self._made = make()

    def current(self) -> T:
        if (stamps := self._look()) != self._stamps:
            self._stamps = stamps
            names = ", ".join(dict.fromkeys(str(path) for path in self._paths if path))
            try:
                self._made = self._make()
                logger.info("%s were read again", names)
            except (ConfigError, OSError) as exc:  # OSError: replaced in this moment
                logger.error("%s; what was read before stays in use", str(exc).rstrip("."))
        return self._made

    def _look(self) -> list[tuple[int, int] | None]:
        """Changes when a file or its mode does, or the link that Kubernetes makes of it."""
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path | None) -> tuple[int, int] | None:
    """None: missing."""
    try:
        status = os.stat(path or "")
    except OSError:
        return None
    return status.st_ctime_ns, status.st_ino


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """The context of an HTTP server. Raises ConfigError when a file is missing or invalid."""
    for name, path in (("tls-cert", cert), ("tls-key", key)):
        read_file(name, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2  # some builds of Python have none
    load_pair(context, cert, key, "tls-cert", "tls-key")
    context.set_alpn_protocols(["http/1.1"])
    return context


def load_pair(context: ssl.SSLContext, cert: Path, key: Path, *names: str) -> None:
    """names: of both files, for the error. Raises ConfigError."""
    try:
        # An encrypted key must fail: its password cannot be entered.
        context.load_cert_chain(cert, key, password=lambda: "")
    except (OSError, ssl.SSLError) as exc:
        pair = " and ".join(f"{n}={path}" for n, path in zip(names, (cert, key), strict=True))
        message = f"{pair} are not a matching PEM pair with an unencrypted key."
        raise ConfigError([message]) from exc


def read_file(name: str, path: Path | str | None) -> bytes | None:
    """The file's content; None without a file. name: of the option. Raises ConfigError."""
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as exc:  # ValueError: a name with a null byte
        why = exc.strerror if isinstance(exc, OSError) else exc
        shown = str(path).replace("\0", "%00")
        raise ConfigError([f"{name}={shown} cannot be read ({why})."]) from exc


#: Error texts of OpenSSL, BoringSSL and gRPC for refused handshakes, and their meanings.
_REFUSALS = (
    (r"(host ?name|ip address) (mismatch|verification)", "its certificate is for another name"),
    (r"CERTIFICATE_VERIFY_FAILED", "its certificate is not trusted; name its authority: ?ca=FILE"),
    (
        # With TLS 1.3 the alert comes after the handshake, and gRPC says only this of it.
        r"ALERT_\w*(CERTIFICATE|UNKNOWN_CA|ACCESS_DENIED)|Unwrap failed \(TSI_DATA_CORRUPTED\)",
        "it does not accept this client's certificate; name one: ?cert=FILE&key=FILE",
    ),
    (r"WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE|HTTP_REQUEST", "it does not speak TLS"),
)


def tls_refusal(text: str) -> str | None:
    """What is wrong with a TLS handshake, from the error text of a library. Returns None for
    other errors, which may be temporary."""
    for pattern, meaning in _REFUSALS:
        if re.search(pattern, text, re.IGNORECASE):
            return meaning
    return None
