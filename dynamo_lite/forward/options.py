"""The options of the Forwarder in the YAML file.

docs/configuration.md says what each means. Imports nothing heavy, because the command line imports
it.
"""

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from dynamo_lite.forward.protocols.registry import PROTOCOLS
from dynamo_lite.protocol.forwarding import EngineRole, ProtocolName
from dynamo_lite.protocol.options import (
    NaturalOption,
    PortOption,
    PositiveOption,
    SecondsOption,
)
from dynamo_lite.protocol.records import LAST_PORT, Port

_NO_HOSTS = ("", "0.0.0.0", "::", "*")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """One stock engine."""

    url: str
    role: EngineRole
    transfer_host: str | None = None
    transfer_port: Port | None = None
    notify_port: Port | None = None
    ca_file: str | None = None

    def __post_init__(self) -> None:
        """Raises ValueError."""
        _, host = self.address, self.transfer_host
        if host is not None and (host in _NO_HOSTS or any(char in host for char in "[]/ ")):
            raise ValueError(
                f"transfer-host is {host!r}: expected the host name or IP address under which"
                " other engines reach this one, without brackets, and not that of all interfaces"
            )
        if not self.secure and self.ca_file is not None:
            raise ValueError("ca-file needs an https:// URL")

    @property
    def secure(self) -> bool:
        return self.url.startswith("https://")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port. Raises ValueError."""
        try:
            if not self.url.startswith(("http://", "https://")):
                raise ValueError("no URL")
            return parse_host_port(self.url)
        except ValueError as exc:
            raise ValueError(
                "expected http://HOST:PORT or https://HOST:PORT without a path, a query or"
                " credentials"
            ) from exc

    def transfer_address(self, protocol: str) -> tuple[str, int]:
        """Where its side of the handover listens. Raises ValueError for an impossible port."""
        host, http_port = self.address
        kind = PROTOCOLS[protocol]
        port = self.transfer_port or kind.default_port or http_port + kind.port_offset
        if port > LAST_PORT:
            raise ValueError(
                f"{self.url}: {protocol} would be at port {port} (HTTP port + {kind.port_offset}),"
                f" beyond {LAST_PORT}: give transfer-port, or a lower HTTP port"
            )
        return self.transfer_host or host, port


@dataclass(frozen=True, kw_only=True)
class ForwarderConfig:
    """An HTTP server in front of stock engines."""

    host: str = "127.0.0.1"
    port: PortOption = 8000
    tls_cert: str | None = None
    tls_key: str | None = None
    protocol: ProtocolName = "nixl"
    engines: tuple[EngineOptions, ...] = field(default_factory=tuple[EngineOptions, ...])
    discover: bool | None = None
    joined_ca_file: str | None = None
    max_local_prefill_length: NaturalOption = 0
    max_attempts: PositiveOption = 3
    prefill_timeout_s: SecondsOption = 120.0
    idle_timeout_s: SecondsOption = 600.0
    health_interval_s: SecondsOption = 1.0
    max_body_bytes: PositiveOption = 32 << 20

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls-cert and tls-key go together")
        urls = [engine.address for engine in self.engines]
        for engine, url in zip(self.engines, urls, strict=True):
            engine.transfer_address(self.protocol)
            if urls.count(url) > 1:
                raise ValueError(f"{engine.url} is named twice; list each engine once")
        roles = sorted(engine.role for engine in self.engines)
        static = not self.discovers and roles == ["decode", "prefill"]
        if self.protocol == "neuron-static" and not static:
            raise ValueError(
                "neuron-static is for one prefill and one decode engine, both listed; use"
                " neuron-dynamic"
            )
        if self.discovers:
            return
        if not self.engines:
            raise ValueError("no engines; list some, or leave out `discover: false`")
        if not any(engine.role != "prefill" for engine in self.engines):
            raise ValueError("no engine decodes; give one the role decode or prefill-decode")

    @property
    def discovers(self) -> bool:
        return not self.engines if self.discover is None else self.discover


def parse_host_port(text: str) -> tuple[str, int]:
    """`HOST:PORT`, also with `http://` or `https://` in front, which changes nothing.

    Raises ValueError.
    """
    parts = urlsplit(text if "://" in text else f"//{text}")
    host, port = parts.hostname, parts.port
    known = parts.scheme in ("", "http", "https")
    extra = parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None
    # An address with a scope is a different one for every list.
    if not known or not host or not port or extra or not host.isascii() or "%" in host:
        raise ValueError("expected HOST:PORT")
    return host, port
