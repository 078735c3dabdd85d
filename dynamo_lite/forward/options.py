"""The options of the Forwarder in the YAML file, and of a sidecar.

docs/configuration.md says what each means. Imports nothing heavy, because the command line imports
it.
"""

from dataclasses import dataclass, field, replace

from dynamo_lite.forward.named import PRIVATE, AllowedHosts, parse_host_port
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
        parse_engine_url(self.url)
        host = self.transfer_host
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
        return parse_engine_url(self.url)

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


def parse_engine_url(url: str) -> tuple[str, int]:
    """Host and port. Raises ValueError."""
    try:
        if not url.startswith(("http://", "https://")):
            raise ValueError("no URL")
        return parse_host_port(url)
    except ValueError as exc:
        raise ValueError(
            "expected http://HOST:PORT or https://HOST:PORT without a path, a query or credentials"
        ) from exc


#: Prefill legs that contain the decode engine's own address.
_NEED_HOST = ("moriio-read", "moriio-write")


@dataclass(frozen=True, kw_only=True)
class SidecarConfig:
    """A server beside one decode engine. `forwarder` has that engine, and the server's options."""

    forwarder: ForwarderConfig
    #: What all prefill engines that headers name have in common; the URL's host and port are any.
    prefillers: EngineOptions = EngineOptions(url="http://localhost:1", role="prefill")
    #: Hosts that headers may name.
    allowed: tuple[str, ...] = PRIVATE
    #: Port of the sidecar's own metrics, on the same address; 0: none.
    metrics_port: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError."""
        AllowedHosts(self.allowed)
        protocol = self.forwarder.protocol
        if protocol in _NEED_HOST and self.forwarder.engines[0].transfer_host is None:
            raise ValueError(
                f"protocol {protocol} tells prefill engines where the decode engine is: give"
                " --transfer-host, this host's address as they see it"
            )

    def prefiller(self, name: str) -> EngineOptions:
        """name: HOST:PORT."""
        scheme = "https" if self.prefillers.secure else "http"
        return replace(self.prefillers, url=f"{scheme}://{name}")
