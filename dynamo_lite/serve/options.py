"""Options of a whole graph (`Graph`) and of a service's processes (`ServiceArgs`)."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import annotated_types as at

from dynamo_lite.runtime.tracing.tracer import TracingOptions

PositiveSeconds = Annotated[float, at.Gt(0)]

Scalar = str | int | float


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """Section `Graph`: options of all processes of a graph."""

    #: Prefix of every etcd key and NATS subject.
    namespace: str = "dynamo"
    #: Address on which status servers and token streams listen. With services on several
    #: nodes it must be reachable from the other nodes.
    bind_host: str = "127.0.0.1"
    #: Certificate and key of the status servers (PEM), for HTTPS; both or neither.
    status_tls_cert: str | None = None
    status_tls_key: str | None = None
    #: A dead process disappears from etcd after this time. Outages of etcd of up to nine
    #: tenths of it cost no lease.
    lease_ttl_s: Annotated[float, at.Ge(2)] = 30.0
    #: Longest drain of one process.
    grace_s: PositiveSeconds = 30.0
    #: Longest delay before a crashed process is restarted.
    restart_max_s: PositiveSeconds = 30.0
    #: Devices of this host that the services with `ServiceArgs.devices` occupy: names for
    #: CUDA_VISIBLE_DEVICES, or their number, to count them only.
    devices: tuple[int | str, ...] | Annotated[int, at.Ge(0)] = 0
    #: URL to which spans are sent; None: no tracing.
    otlp_endpoint: str | None = None
    #: Share of the requests that are traced, unless the client decides it.
    trace_ratio: Annotated[float, at.Ge(0), at.Le(1)] = 1.0

    @property
    def status_tls(self) -> tuple[str, str] | None:
        """Paths of certificate and key; None for HTTP."""
        if self.status_tls_cert is None or self.status_tls_key is None:
            return None
        return str(Path(self.status_tls_cert).absolute()), str(Path(self.status_tls_key).absolute())

    @property
    def tracing(self) -> TracingOptions | None:
        if self.otlp_endpoint is None:
            return None
        return TracingOptions(endpoint=self.otlp_endpoint, ratio=self.trace_ratio)


@dataclass(frozen=True, kw_only=True)
class ServiceArgs:
    """Section `Service.ServiceArgs`: how a service's processes are started."""

    #: Number of processes.
    workers: Annotated[int, at.Ge(0)] = 1
    #: Port of the status server of the first process, on `Graph.bind-host`; the second process has
    #: the next port, and so on. 0: free ports.
    status_port: Annotated[int, at.Ge(0), at.Le(65535)] = 0
    #: Devices of `Graph.devices` that each process occupies.
    devices: Annotated[int, at.Ge(0)] = 0
    #: Environment variables. A list gives each worker its own value, e.g.
    #: `CUDA_VISIBLE_DEVICES: [0, 1]` for two workers.
    env: dict[str, Scalar | list[Scalar]] = field(default_factory=dict)
