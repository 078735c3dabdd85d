"""Addresses: what server URLs mean, how they may be shown, and which address a
process gives others for its own servers.

URLs may carry credentials; only `redact`ed ones reach a log or an error.
"""

import re
import socket
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit

from dynamo_lite.protocol.errors import ConfigError

#: Up to the last @ of a URL: passwords in the wild hold @, / and commas, unescaped.
_CREDENTIALS = re.compile(r"([a-z+]+://)?(?:(?!,[a-z+]+://)\S)*@")
_ETCD_PORT = 2379
_IPV4 = re.compile(r"\d{1,3}(\.\d{1,3}){3}")


def redact(text: str) -> str:
    """`text`, a URL or a sentence with URLs, without user names, passwords and tokens."""
    return _CREDENTIALS.sub(lambda hit: hit[1] or "", text)


@dataclass(frozen=True)
class EtcdAddress:
    """Where etcd is, in the two pieces that aetcd joins with a colon."""

    host: str
    port: int
    user: str | None = None
    password: str | None = field(default=None, repr=False)


def parse_etcd_url(url: str) -> EtcdAddress:
    """Parses `http://[USER:PASSWORD@]HOST[:PORT]`, or several separated by commas.

    Several members are possible only by IPv4 address (a gRPC name cannot list
    host names). Raises ConfigError.
    """
    parts = [_split(part.strip(), url) for part in url.split(",")]
    if len(parts) > 1 and not all(_IPV4.fullmatch(part.hostname or "") for part in parts):
        raise ConfigError([f"etcd URL {redact(url)}: several members need IPv4 addresses."])
    ends = [(_bracketed(part.hostname or ""), part.port or _ETCD_PORT) for part in parts]
    first = parts[0]
    if (first.username is None) != (first.password is None):
        raise ConfigError([f"etcd URL {redact(url)}: user and password go together."])
    user, password = first.username, first.password
    host, port = ends[-1]
    if len(ends) > 1:
        host = "ipv4:" + ",".join([f"{h}:{p}" for h, p in ends[:-1]] + [host])
    return EtcdAddress(
        host,
        port,
        unquote(user) if user is not None else None,
        unquote(password) if password is not None else None,
    )


def advertised_address(bind_host: str, port: int) -> str:
    """HOST:PORT under which others reach a server that listens on `bind_host`.

    A server on all interfaces is reached by the host's name, as it names itself:
    a fully qualified one would be `localhost` where no DNS knows the host.
    """
    everywhere = bind_host in ("", "0.0.0.0", "::")
    return host_port(socket.gethostname() if everywhere else bind_host, port)


def host_port(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"{_bracketed(host)}:{port}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _split(part: str, url: str) -> SplitResult:
    try:
        split = urlsplit(part if "//" in part else f"http://{part}")
        _ = split.port
    except ValueError as exc:
        raise ConfigError([f"etcd URL {redact(url)} is malformed."]) from exc
    if split.scheme != "http" or not split.hostname:
        raise ConfigError([f"etcd URL {redact(url)}: expected http://HOST:PORT."])
    return split
