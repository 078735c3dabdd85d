"""Sections of the YAML file that are no service's own: `Graph` and `ServiceArgs`."""

from dataclasses import dataclass, field
from typing import Annotated

import annotated_types as at

from dynamo_lite.runtime.tracing.tracer import TracingOptions

Positive = Annotated[float, at.Gt(0)]

Scalar = str | int | float


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """Section `Graph`: what all processes of a graph share.

    namespace: prefix of every etcd key and NATS subject. bind_host: where status
    servers and token streams listen; an address that other nodes can reach when
    services run on several. lease_ttl_s: a dead process disappears from etcd
    after this long, and outages of etcd of up to nine tenths of it cost no lease.
    grace_s: longest drain of one process. restart_max_s: longest pause before a
    process that crashed is started again. otlp_endpoint: where spans are sent to; None:
    nothing is traced. trace_ratio: share of the requests that are, unless the client has
    decided.
    """

    namespace: str = "dynamo"
    bind_host: str = "127.0.0.1"
    lease_ttl_s: Annotated[float, at.Ge(2)] = 30.0
    grace_s: Positive = 30.0
    restart_max_s: Positive = 30.0
    otlp_endpoint: str | None = None
    trace_ratio: Annotated[float, at.Ge(0), at.Le(1)] = 1.0

    @property
    def tracing(self) -> TracingOptions | None:
        if self.otlp_endpoint is None:
            return None
        return TracingOptions(endpoint=self.otlp_endpoint, ratio=self.trace_ratio)


@dataclass(frozen=True, kw_only=True)
class ServiceArgs:
    """Section `Service.ServiceArgs`: how its processes are started.

    workers: how many. env: environment variables; a list gives each worker its
    own value, e.g. `CUDA_VISIBLE_DEVICES: [0, 1]` for two workers.
    """

    workers: Annotated[int, at.Ge(0)] = 1
    env: dict[str, Scalar | list[Scalar]] = field(default_factory=dict)
