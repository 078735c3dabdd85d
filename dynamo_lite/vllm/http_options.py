"""vLLM's arguments for the HTTP server: TLS, access log, limits on a request's head.

vLLM passes them to uvicorn; here the Frontend's own server uses them.
"""

import ssl
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.runtime.tls import Reread, TlsFiles, load_pair, read_file

#: vLLM's default, and ours: a stranger's head is kept, and copied with each piece that arrives.
_VLLMS_HEAD_BYTES, _HEAD_BYTES = 4 << 20, 64 << 10

TLS_KEYS = (
    *("ssl-certfile", "ssl-keyfile", "ssl-ca-certs"),
    *("ssl-cert-reqs", "ssl-ciphers", "enable-ssl-refresh"),
)


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """TLS of the HTTP server."""

    #: PEM; contains the key if `keyfile` is None.
    certfile: str
    keyfile: str | None = None
    #: The authorities for clients' certificates.
    ca_certs: str | None = None
    #: Whether clients need a certificate, as `ssl.VerifyMode`.
    cert_reqs: int = ssl.CERT_NONE
    ciphers: str | None = None
    #: Whether files are read again when they change.
    refresh: bool = False

    def contexts(self) -> Callable[[], ssl.SSLContext]:
        """Returns what gives the context of a new connection. Raises StartupError if files are
        missing or do not match."""
        cert, key = Path(self.certfile), Path(self.keyfile or self.certfile)
        files = TlsFiles(Path(self.ca_certs) if self.ca_certs else None, cert, key)
        try:
            return Reread(files if self.refresh else None, partial(self._context, files)).current
        except (ConfigError, OSError, ValueError) as exc:
            raise StartupError(f"TLS of the HTTP server: {exc}") from exc

    def _context(self, files: TlsFiles) -> ssl.SSLContext:
        """Raises ConfigError or OSError."""
        assert files.cert is not None and files.key is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2  # some builds of Python have none
        names = "ssl-certfile", "ssl-keyfile", "ssl-ca-certs"
        for name, path in zip(names, (files.cert, files.key, files.ca), strict=True):
            read_file(name, path)
        load_pair(context, files.cert, files.key, *names[:2])
        if files.ca is not None:
            context.load_verify_locations(files.ca)
        if self.ciphers:
            context.set_ciphers(self.ciphers)
        context.verify_mode = ssl.VerifyMode(self.cert_reqs)
        return context


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """Options of the HTTP server."""

    #: Whether requests are logged.
    access_log: bool = True
    #: Paths whose requests are not logged.
    quiet_paths: frozenset[str] = frozenset()
    #: How long an idle connection stays open.
    keep_alive_s: int = 5
    #: Log level of uvicorn; None for the level of the process.
    log_level: str | None = None
    #: Limits on a request's head; beyond them it gets a 400.
    max_head_bytes: int = _HEAD_BYTES
    max_headers: int = 256
    #: None for plain HTTP.
    tls: TlsOptions | None = None


def http_options(args: Namespace, keep_alive_s: int) -> HttpOptions:
    """args: parsed arguments of `vllm serve`. Raises ConfigError."""
    quiet = (args.disable_access_log_for_endpoints or "").split(",")
    head_bytes = args.h11_max_incomplete_event_size
    return HttpOptions(
        access_log=not args.disable_uvicorn_access_log,
        quiet_paths=frozenset(path.strip() for path in quiet if path.strip()),
        keep_alive_s=keep_alive_s,
        log_level=args.uvicorn_log_level,
        max_head_bytes=_HEAD_BYTES if head_bytes == _VLLMS_HEAD_BYTES else head_bytes,
        max_headers=args.h11_max_header_count,
        tls=tls_options({key: getattr(args, key.replace("-", "_")) for key in TLS_KEYS}),
    )


def tls_options(flags: Mapping[str, Any]) -> TlsOptions | None:
    """flags: vLLM's arguments in kebab-case. Raises ConfigError for those without an effect."""
    certfile = flags.get("ssl-certfile")
    if not certfile:
        if idle := [key for key in TLS_KEYS if flags.get(key)]:
            raise ConfigError([f"{key}: does nothing without ssl-certfile" for key in idle])
        return None
    cert_reqs = int(flags.get("ssl-cert-reqs") or 0)
    if cert_reqs and not flags.get("ssl-ca-certs"):
        raise ConfigError(["ssl-cert-reqs: needs ssl-ca-certs, the trusted authorities"])
    if cert_reqs not in (0, 1, 2):
        raise ConfigError([f"ssl-cert-reqs: expected 0, 1 or 2, got {cert_reqs}"])
    return TlsOptions(
        certfile=certfile,
        keyfile=flags.get("ssl-keyfile") or None,
        ca_certs=flags.get("ssl-ca-certs") or None,
        cert_reqs=cert_reqs,
        ciphers=flags.get("ssl-ciphers") or None,
        refresh=bool(flags.get("enable-ssl-refresh")),
    )
