"""The certificates of a graph: a folder with the authority's (`ca.pem`), and for each component of
this host a certificate and its key (`NAME.pem`, `NAME-key.pem`).

A certificate says whose it is by the URI `dynamo-lite://NAMESPACE/COMPONENT`. Peers compare that,
and no host names. Both sides of a connection show one.
"""

import datetime
import logging
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.runtime.credentials import open_to_others
from dynamo_lite.runtime.tls import TlsFiles, load_pair

logger = logging.getLogger(__name__)

T = TypeVar("T")

SCHEME = "dynamo-lite://"
#: OpenSSL's names of what is wrong with a certificate contain one of these.
_OF_CERTIFICATES = ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED", "BAD_CERT")


def files_of(folder: Path, name: str) -> TlsFiles:
    """The authority's file, and certificate and key of this name."""
    return TlsFiles(folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}-key.pem")


def identity(namespace: str, component: str) -> str:
    """The URI in a component's certificate."""
    return f"{SCHEME}{namespace}/{component}"


def with_files(url: str, folder: Path | None, component: str) -> str:
    """The URL of NATS or etcd with the component's files where it means TLS and names no others."""
    base, _, query = url.partition("?")
    if folder is None or not ("tls://" in base or "https://" in base):
        return url
    given = [pair for pair in query.split("&") if pair]
    names = {pair.partition("=")[0] for pair in given}
    files, own = files_of(folder, component), {"cert", "key"} & names
    for name, path in (("ca", files.ca), ("cert", files.cert), ("key", files.key)):
        if name not in names and (name == "ca" or not own):
            given.append(f"{name}={quote(str(path))}")
    return f"{base}?{'&'.join(given)}"


class Certificates:
    """One component's certificate and key, and the authority of its graph.

    The files are read again when they have changed. While they cannot be used then, what was read
    before stays in use, which is logged.
    """

    def __init__(self, folder: Path, namespace: str, component: str):
        """Raises ConfigError, which names the file and what is wrong with it."""
        self.folder, self.namespace, self.component = folder, namespace, component
        self.files = files_of(folder, component)
        self._read_at = self._stamp()
        self._contexts = self._load()

    def client(self) -> ssl.SSLContext:
        """The context for a new connection to a server, which is to be checked by `refusal`."""
        return self._current()[0]

    def server(self) -> ssl.SSLContext:
        """The context for a connection that was accepted. The client must have a certificate of the
        authority, and is to be checked by `refusal`."""
        return self._current()[1]

    def open_server(self) -> ssl.SSLContext:
        """As `server`, but a client may have no certificate."""
        return self._current()[2]

    def refusal(self, connection: ssl.SSLObject | None, *components: str) -> str:
        """Why the peer of this connection is none of these components of the graph; empty if it is
        one. Without components every one of the graph is taken."""
        shown = None if connection is None else connection.getpeercert()
        if not shown:
            return "it shows no certificate"
        of = [str(n[1]) for n in shown.get("subjectAltName", ()) if n[0] == "URI" and len(n) > 1]
        wanted = [identity(self.namespace, component) for component in components]
        if any(one in wanted for one in of):
            return ""
        if not components and any(one.startswith(identity(self.namespace, "")) for one in of):
            return ""
        expected = " or ".join(wanted) or f"{identity(self.namespace, '')}..."
        return f"its certificate is of {', '.join(of) or 'no component'}, not of {expected}"

    def explained(self, failure: Exception | str) -> str:
        """What a failed handshake, or a connection lost right after it, says about certificates;
        empty if nothing."""
        if isinstance(failure, ssl.SSLCertVerificationError):
            why = failure.verify_message
            return f"its certificate is not valid under {self.files.ca}: {why}"
        text = str(failure).upper()
        if "DID_NOT_RETURN_A_CERTIFICATE" in text:
            return "it shows no certificate"
        if "ALERT" in text and any(word in text for word in _OF_CERTIFICATES):
            return f"it does not accept {self.files.cert}: {failure}"
        return ""

    def _current(self) -> list[ssl.SSLContext]:
        if (stamp := self._stamp()) != self._read_at:
            self._read_at = stamp
            try:
                self._contexts = self._load()
                logger.info("the certificates in %s were read again", self.folder)
            except Exception as exc:  # cryptography's errors have no class of their own
                why = [f"{self.folder}: {exc!r}"]
                why = exc.mistakes if isinstance(exc, ConfigError) else why
                logger.error("%s; what was read before stays in use", "; ".join(why))
        return self._contexts

    def _stamp(self) -> list[tuple[int, int] | None]:
        """Changes when a file or its mode does, or the link that Kubernetes makes of it."""
        return [_version(path) for path in (self.files.ca, self.files.cert, self.files.key)]

    def _load(self) -> list[ssl.SSLContext]:
        """For a client, a server that demands a certificate, and one that takes clients without."""
        check(self.files, identity(self.namespace, self.component))
        made: list[ssl.SSLContext] = []
        for side, demand in (
            (ssl.PROTOCOL_TLS_CLIENT, ssl.CERT_REQUIRED),
            (ssl.PROTOCOL_TLS_SERVER, ssl.CERT_REQUIRED),
            (ssl.PROTOCOL_TLS_SERVER, ssl.CERT_OPTIONAL),
        ):
            context = ssl.SSLContext(side)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname, context.verify_mode = False, demand
            _load_into(context, self.files)
            made.append(context)
        made[2].set_alpn_protocols(["http/1.1"])
        return made


def _version(path: Path | None) -> tuple[int, int] | None:
    """None: missing."""
    try:
        status = os.stat(path or "")
    except OSError:
        return None
    return status.st_ctime_ns, status.st_ino


def check(files: TlsFiles, uri: str) -> None:
    """Raises ConfigError unless the certificate is of `uri`, is valid now, has the key, and comes
    from the authority."""
    assert files.ca is not None and files.cert is not None and files.key is not None
    authorities, chain = _certificates(files.ca), _certificates(files.cert)
    if open_to_others(_found(files.key, files.key.stat)):
        raise _mistake(files.key, f"it is open to other users: chmod 600 {files.key}")
    if uri not in (names := _uris(chain[0])):
        raise _mistake(files.cert, f"it is of {', '.join(names) or 'no component'}, not of {uri}")
    _check_dates(files.cert, chain[0])
    above = [*chain[1:], *(one for one in authorities if _issued(chain[-1], one))]
    if len(above) < len(chain) or not all(map(_issued, chain[:-1], above)):
        raise _mistake(files.cert, f"it does not come from the authority in {files.ca}")
    _check_dates(files.ca, above[-1])


def _load_into(context: ssl.SSLContext, files: TlsFiles) -> None:
    assert files.cert is not None and files.key is not None
    try:
        context.load_verify_locations(files.ca)
    except (OSError, ssl.SSLError) as exc:
        assert files.ca is not None
        raise _mistake(files.ca, "it is not a PEM file of authorities") from exc
    try:
        load_pair(context, files.cert, files.key, "cert", "key")
    except ConfigError as exc:
        raise _mistake(files.key, f"it is not the unencrypted key of {files.cert}") from exc


def _check_dates(path: Path, certificate: x509.Certificate) -> None:
    now = datetime.datetime.now(datetime.UTC)
    if now > (end := certificate.not_valid_after_utc):
        remedy = "remove it and its key, and make new ones: `dynamo-lite access certs`"
        raise _mistake(path, f"it has expired on {end:%Y-%m-%d %H:%M} UTC; {remedy}")
    if now < (start := certificate.not_valid_before_utc):
        raise _mistake(path, f"it is not valid before {start:%Y-%m-%d %H:%M} UTC")


def _certificates(path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(_found(path, path.read_bytes))
    except ValueError as exc:
        raise _mistake(path, "it is not a PEM file of certificates") from exc


def _found(path: Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except OSError as exc:
        raise _mistake(path, f"it cannot be read ({exc.strerror})") from exc


def _uris(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)


def _issued(certificate: x509.Certificate, by: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(by)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _mistake(path: Path, what: str) -> ConfigError:
    return ConfigError([f"certificate file {path}: {what}"])
