"""The certificates of a graph: a folder with the authority's (`ca.pem`), and for each component of
this host a certificate and its key (`NAME.pem`, `NAME-key.pem`).

A certificate says whose it is by the URI `dynamo-lite://NAMESPACE/COMPONENT`. Peers compare that,
and no host names. Both sides of a connection show one.
"""

import contextlib
import ssl
from pathlib import Path
from urllib.parse import quote

from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.runtime.credentials import open_to_others
from dynamo_lite.runtime.tls import Reread, TlsFiles, load_pair

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
    """One component's certificate and key, and the authority of its graph; see `Reread`."""

    def __init__(self, folder: Path, namespace: str, component: str):
        """Raises ConfigError, which names the file and what is wrong with it."""
        self.folder, self.namespace, self.component = folder, namespace, component
        self.files = files_of(folder, component)
        self._contexts = Reread(self.files, self._load)

    def client(self) -> ssl.SSLContext:
        """The context for a new connection to a server, which is to be checked by `refusal`."""
        return self._contexts.current()[0]

    def server(self) -> ssl.SSLContext:
        """The context for a connection that was accepted. The client must have a certificate of the
        authority, and is to be checked by `refusal`."""
        return self._contexts.current()[1]

    def open_server(self) -> ssl.SSLContext:
        """As `server`, but a client may have no certificate."""
        return self._contexts.current()[2]

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

    def _load(self) -> list[ssl.SSLContext]:
        """For a client, a server that demands a certificate, and one that takes clients without.
        What any peer would refuse is refused here: both ends of a handshake are tried in memory."""
        files = self.files
        files.context()  # raises for files that are missing or no PEM files
        assert files.cert is not None and files.key is not None
        if open_to_others(files.key.stat()):
            mistake = f"key={files.key} is open to other users: chmod 600 {files.key}"
            raise ConfigError([mistake])
        made: list[ssl.SSLContext] = []
        for side, demand in (
            (ssl.PROTOCOL_TLS_CLIENT, ssl.CERT_REQUIRED),
            (ssl.PROTOCOL_TLS_SERVER, ssl.CERT_REQUIRED),
            (ssl.PROTOCOL_TLS_SERVER, ssl.CERT_OPTIONAL),
        ):
            context = ssl.SSLContext(side)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname, context.verify_mode = False, demand
            context.load_verify_locations(files.ca)
            load_pair(context, files.cert, files.key, "cert", "key")
            made.append(context)
        made[2].set_alpn_protocols(["http/1.1"])
        try:
            why = self.refusal(_shake_hands(made[0], made[1]), self.component)
        except ssl.SSLError as exc:
            why = self.explained(exc) or str(exc)
        if why:
            remedy = "remove it and its key, and make new ones: `dynamo-lite access certs`"
            raise ConfigError([f"{files.cert}: {why}; {remedy}"])
        return made


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> ssl.SSLObject:
    """The client's end of a connection in memory. Raises SSLError."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)
    for end in ends * 2:
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    return ends[0]
