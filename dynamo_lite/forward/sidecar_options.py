"""The options of a sidecar. Imports nothing heavy: the command line does."""

from dataclasses import dataclass, replace
from typing import Literal
from urllib.parse import urlsplit

from dynamo_lite.forward.named import PRIVATE, AllowedHosts
from dynamo_lite.forward.options import (
    EngineOptions,
    ForwarderConfig,
    ProtocolName,
    parse_engine_url,
)
from dynamo_lite.runtime.address import host_port

#: Their engines learn each other's addresses from both legs, or from an answer.
SIDECAR_PROTOCOLS: tuple[ProtocolName, ...] = (
    *("nixl", "nixl-push", "mooncake", "sglang"),
    *("moriio-read", "moriio-write"),
)
#: Prefill legs that contain the decode engine's own address.
_NEED_HOST = ("moriio-read", "moriio-write")


@dataclass(frozen=True, kw_only=True)
class PrefillerOptions:
    """Options of all prefill engines that headers name."""

    https: bool = False
    ca_file: str | None = None
    insecure_skip_verify: bool = False
    #: Where their side of the handover listens; None: the protocol's default.
    transfer_port: int | None = None

    def engine(self, name: str) -> EngineOptions:
        """name: HOST:PORT."""
        return EngineOptions(
            url=f"{'https' if self.https else 'http'}://{name}",
            role="prefill",
            transfer_port=self.transfer_port,
            ca_file=self.ca_file if self.https else None,
            insecure_skip_verify=self.https and self.insecure_skip_verify,
        )


@dataclass(frozen=True, kw_only=True)
class SidecarConfig:
    """A server beside one decode engine.

    `forwarder` has the HTTP server's options, and an engine for each data-parallel rank: rank r
    listens r ports above the first one, and so does the server in front of it.
    """

    forwarder: ForwarderConfig
    prefillers: PrefillerOptions = PrefillerOptions()
    #: Hosts that headers may name.
    allowed: tuple[str, ...] = PRIVATE
    #: How one of several named prefill engines is chosen.
    choice: Literal["first", "random"] = "first"
    #: Port of the sidecar's own metrics, on the same address; 0: none.
    metrics_port: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError."""
        AllowedHosts(self.allowed)
        protocol = self.forwarder.protocol
        if protocol not in SIDECAR_PROTOCOLS:
            known = ", ".join(SIDECAR_PROTOCOLS)
            raise ValueError(f"protocol {protocol}: a sidecar speaks {known}")
        if protocol in _NEED_HOST and self.forwarder.engines[0].transfer_host is None:
            raise ValueError(
                f"protocol {protocol} tells prefill engines where the decode engine is: give"
                " --transfer-host, this host's address as they see it"
            )
        ports = range(self.forwarder.port, self.forwarder.port + self.ranks)
        if self.forwarder.port and (ports[-1] > 65535 or self.metrics_port in ports):
            raise ValueError(f"ports {ports[0]} to {ports[-1]} are not free for the ranks")

    @property
    def ranks(self) -> int:
        return len(self.forwarder.engines)


def decode_engines(first: EngineOptions, ranks: int) -> tuple[EngineOptions, ...]:
    """One for each data-parallel rank, on consecutive ports. Raises ValueError."""
    host, port = parse_engine_url(first.url)
    if not 1 <= ranks <= 1024 or port + ranks - 1 > 65535:
        raise ValueError(f"{ranks} ranks from port {port} on: at most 1024, up to port 65535")
    scheme = urlsplit(first.url).scheme
    return tuple(
        replace(first, url=f"{scheme}://{host_port(host, port + rank)}") for rank in range(ranks)
    )
