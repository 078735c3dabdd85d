"""The options of a sidecar. Imports nothing heavy: the command line does."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from dynamo_lite.forward.named import PRIVATE, AllowedHosts
from dynamo_lite.forward.options import (
    EngineOptions,
    ForwarderConfig,
    parse_engine_url,
)
from dynamo_lite.runtime.address import host_port

#: Prefill legs that contain the decode engine's own address.
_NEED_HOST = ("moriio-read", "moriio-write")
_PREFILLERS = EngineOptions(url="http://localhost:1", role="prefill")


class UnverifiedEngine(EngineOptions):
    """An engine of which any certificate is accepted."""

    unverified = True


def trusted_engine(ca_file: Path | None, unverified: bool, **options: Any) -> EngineOptions:
    """An engine of which any certificate is accepted, or one of the authorities in the file (None:
    the system's). Raises ValueError."""
    if not options["url"].startswith("https:"):
        return EngineOptions(**options)
    if unverified:
        return UnverifiedEngine(**options)
    return EngineOptions(**options, ca_file=None if ca_file is None else str(ca_file))


@dataclass(frozen=True, kw_only=True)
class SidecarConfig:
    """A server beside one decode engine.

    `forwarder` has the HTTP server's options, and an engine for each data-parallel rank: rank r
    listens r ports above the first one, and so does the server in front of it.
    """

    forwarder: ForwarderConfig
    #: What all prefill engines that headers name have in common; the URL's host and port are any.
    prefillers: EngineOptions = _PREFILLERS
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

    def prefiller(self, name: str) -> EngineOptions:
        """name: HOST:PORT."""
        scheme = "https" if self.prefillers.secure else "http"
        return replace(self.prefillers, url=f"{scheme}://{name}")


def decode_engines(first: EngineOptions, ranks: int) -> tuple[EngineOptions, ...]:
    """One for each data-parallel rank, on consecutive ports. Raises ValueError."""
    host, port = parse_engine_url(first.url)
    if not 1 <= ranks <= 1024 or port + ranks - 1 > 65535:
        raise ValueError(f"{ranks} ranks from port {port} on: at most 1024, up to port 65535")
    scheme = urlsplit(first.url).scheme
    return tuple(
        replace(first, url=f"{scheme}://{host_port(host, port + rank)}") for rank in range(ranks)
    )
