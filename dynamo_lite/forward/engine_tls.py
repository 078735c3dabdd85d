"""TLS to engines, and how an engine's certificate is checked."""

import ssl
from functools import lru_cache
from pathlib import Path

from dynamo_lite.forward.options import EngineOptions
from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.runtime.tls import TlsFiles


def engine_tls(options: EngineOptions) -> ssl.SSLContext | None:
    """None: plain HTTP.

    Files are read once per process. Raises ConfigError when one cannot be read or is invalid.
    """
    if not options.secure:
        return None
    try:
        return _context(options.ca_file, options.insecure_skip_verify)
    except ConfigError as exc:
        named = [mistake.replace("ca=", "ca-file=", 1) for mistake in exc.mistakes]
        raise ConfigError([f"{options.url}: {mistake}" for mistake in named]) from exc


def check_trust(ca_file: str | None) -> None:
    """Reads the file, so that it is known to be readable when an engine joins. Raises
    ConfigError."""
    try:
        _context(ca_file, False)
    except ConfigError as exc:
        raise ConfigError([m.replace("ca=", "joined-ca-file=", 1) for m in exc.mistakes]) from exc


@lru_cache(maxsize=64)
def _context(ca_file: str | None, insecure: bool) -> ssl.SSLContext:
    """Shared by all engines with these options: loading the system's authorities takes a while."""
    context = TlsFiles(ca=None if ca_file is None else Path(ca_file)).context()
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
