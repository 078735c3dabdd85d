"""Addresses: parsing and redaction of server URLs, and the advertised address of own servers.

URLs may contain credentials and names of key files. Only redacted URLs may reach a log or an
error.
"""

import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.runtime.credentials import check_nkey, read_login, user_jwt
from dynamo_lite.runtime.tls import TlsFiles

#: Up to the last @ of a URL: real passwords contain unescaped @, / and commas.
_CREDENTIALS = re.compile(r"([a-z+]+://)?(?:(?!,[a-z+]+://)\S)*@")
_QUERY = re.compile(r"(?<=\S)\?\S+")
#: Characters of one subject token, with dots between several.
_INBOX = re.compile(r"_INBOX[A-Za-z0-9_-]{0,58}(\.[A-Za-z0-9_-]{1,64}){0,7}")
_TLS_FILES = ("ca", "cert", "key")


def redact(text: str) -> str:
    """Removes user names, passwords, tokens and queries from the URLs in `text`."""
    return _QUERY.sub("", _CREDENTIALS.sub(lambda hit: hit[1] or "", text))


def has_credentials(url: str) -> bool:
    """Whether a user, a password or a token is written in `url` itself."""
    return "@" in url.partition("?")[0]


@dataclass(frozen=True)
class ServerAddress:
    """The servers of one cluster, and the credentials of a client."""

    #: (name or address, port), the preferred server first.
    hosts: tuple[tuple[str, int], ...]
    #: None for plain TCP.
    tls: TlsFiles | None = None
    #: User and password are both set, or neither.
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    #: This and the following are only for NATS.
    token: str | None = field(default=None, repr=False)
    #: A credentials file: a JWT and the seed of its NKey.
    creds: Path | None = None
    #: A file with the seed of a user's NKey.
    nkey: Path | None = None
    #: Prefix of the subjects on which replies are received; empty: `_INBOX`.
    inbox: str = ""

    @property
    def on_loopback(self) -> bool:
        """Whether no other host is named: what is sent there crosses no network."""
        return all(is_loopback(host) for host, _ in self.hosts)


@dataclass(frozen=True)
class _Kind:
    name: str
    #: Scheme to whether it means TLS.
    schemes: Mapping[str, bool]
    default_port: int
    #: Parameters that the query of its URL may contain.
    query: tuple[str, ...]


_ETCD = _Kind("etcd", {"http": False, "https": True}, 2379, (*_TLS_FILES, "login"))
_NATS = _Kind(
    "NATS",
    {"nats": False, "tls": True},
    4222,
    (*_TLS_FILES, "login", "creds", "nkey", "inbox"),
)


def parse_etcd_url(url: str) -> ServerAddress:
    """Parses `http[s]://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]...][?ca=&cert=&key=&login=]`.

    Special characters of user, password and file names are written as %XX. Each host may
    have the scheme and the same credentials in front. `login` is a file with USER:PASSWORD.
    Raises ConfigError, also when a file is missing or invalid, or when others can read a login.
    """
    return _parse(url, _ETCD)


def parse_nats_url(url: str) -> ServerAddress:
    """As `parse_etcd_url`, with `nats://` and `tls://`. `TOKEN` alone is allowed.

    The query may also have `creds` or `nkey`, files, and `inbox`: see `ServerAddress`.
    """
    return _parse(url, _NATS)


def _parse(url: str, kind: _Kind) -> ServerAddress:
    try:
        return _address(url, kind)
    except ConfigError as exc:
        problem, cause = exc.mistakes[0].rstrip("."), exc
    except ValueError as exc:
        problem, cause = str(exc), exc
    raise ConfigError([f"{kind.name} URL {redact(url)}: {problem}."]) from cause


def _address(url: str, kind: _Kind) -> ServerAddress:
    """Raises ValueError or ConfigError, with what is wrong."""
    servers, _, query = url.strip().partition("?")
    if "@" in query:  # the ? may be part of a password
        raise ValueError("a ? in a password is written as %3F, an @ in a file name as %40")
    parts = [_split(part.strip(), kind) for part in servers.split(",")]
    schemes = {part.scheme for part in parts if part.scheme}
    if len(schemes) > 1:
        raise ValueError("all servers need the same scheme")
    secure = kind.schemes[schemes.pop()] if schemes else False
    first, *others = parts
    for part in others:
        own = _credentials(part)
        if own is not None and (own != _credentials(first) or not part.scheme):
            hint = "write them once, before the first host, special characters as %XX"
            raise ValueError(f"servers have different credentials; {hint}")
    given = _query(query, kind)
    tls = _tls(given, kind, secure=secure)
    user, password = _login(_credentials(first), given) or (None, None)
    if user is not None and password is None and kind is _ETCD:
        raise ValueError("user and password go together; write USER:PASSWORD@HOST")
    if (creds := _path(given["creds"]) if "creds" in given else None) is not None:
        user_jwt(creds)
    return ServerAddress(
        hosts=tuple((part.hostname or "", part.port or kind.default_port) for part in parts),
        tls=tls,
        user=user if password is not None else None,
        password=password,
        token=user if password is None else None,
        creds=creds,
        nkey=check_nkey(_path(given["nkey"])) if "nkey" in given else None,
        inbox=given.get("inbox", ""),
    )


def _split(part: str, kind: _Kind) -> SplitResult:
    """Splits the URL of one server, which may have no scheme."""
    try:
        split = urlsplit(part if "://" in part else f"//{part}")
        _ = split.port
    except ValueError as exc:
        hint = "check the port; special characters of a password are written as %XX"
        raise ValueError(f"it is malformed; {hint}") from exc
    known = not split.scheme or split.scheme in kind.schemes
    if not known or not split.hostname or split.path.strip("/") or split.fragment:
        expected = " or ".join(f"{scheme}://HOST:PORT" for scheme in kind.schemes)
        raise ValueError(f"expected {expected}")
    return split


def _credentials(part: SplitResult) -> tuple[str, str | None] | None:
    if part.username is None:
        return None
    return unquote(part.username), None if part.password is None else unquote(part.password)


def _query(query: str, kind: _Kind) -> dict[str, str]:
    """The settings behind the `?`, decoded."""
    given: dict[str, str] = {}
    for pair in query.split("&") if query else ():
        name, _, value = pair.partition("=")
        if name not in kind.query or not value or name in given:
            known = ", ".join(f"{n}={'NAME' if n == 'inbox' else 'FILE'}" for n in kind.query)
            problem = f"its query takes {known}, each once"
            raise ValueError(f"{problem}; {unquote(name) or 'an empty one'} does not fit")
        given[name] = unquote(value)
    if "inbox" in given and not _INBOX.fullmatch(given["inbox"]):
        raise ValueError("inbox is a subject: _INBOX, letters, digits, _ and -, with single dots")
    return given


def _login(
    written: tuple[str, str | None] | None, given: Mapping[str, str]
) -> tuple[str, str | None] | None:
    """User and password, from the URL or a file. Only one kind of credentials is allowed."""
    ways = [name for name in ("login", "creds", "nkey") if name in given]
    if len(ways) + (written is not None) > 1:
        names = ", ".join(ways) + (" and those before the @" if written else "")
        raise ValueError(f"several credentials ({names}); keep one")
    return read_login(_path(given["login"])) if "login" in given else written


def _path(text: str) -> Path:
    # Leaves ~NAME of an unknown user as it is: who reads the file says that it is missing.
    return Path(os.path.expanduser(text))


def _tls(given: Mapping[str, str], kind: _Kind, *, secure: bool) -> TlsFiles | None:
    files = {name: _path(given[name]) for name in _TLS_FILES if name in given}
    if not secure:
        if files:
            scheme = next(scheme for scheme, tls in kind.schemes.items() if tls)
            raise ValueError(f"{', '.join(files)}: certificates need TLS; write {scheme}://")
        return None
    if ("cert" in files) != ("key" in files):
        raise ValueError("cert and key go together; name both files")
    tls = TlsFiles(**files)
    tls.context()
    return tls


def advertised_address(bind_host: str, port: int) -> str:
    """HOST:PORT under which others reach a server that listens on `bind_host`.

    For a server on all interfaces this is the host's own short name: its fully qualified
    name would be `localhost` where DNS does not know the host.
    """
    everywhere = bind_host in ("", "0.0.0.0", "::")
    return host_port(socket.gethostname() if everywhere else bind_host, port)


def local_url(host: str, port: int, *, tls: bool) -> str:
    """The HTTP URL of a server that listens on `host`, for a client on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{'https' if tls else 'http'}://{host_port(host, port)}"


def host_port(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a server on this address is reachable only from its own machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
