"""The metrics that every process with a lease has."""

from contextlib import AbstractContextManager

from prometheus_client import CollectorRegistry, Counter, Gauge, Info

from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.process.component import ProcessSpec
from dynamo_lite.runtime.store import Lease


def add_gauges(
    registry: CollectorRegistry, spec: ProcessSpec, lease: Lease, messaging: Messaging
) -> None:
    """Registers the metrics that are read from `lease` and `messaging` when they are asked for."""
    # Prometheus adds its own labels to all metrics of a target; these can be joined with them.
    whose = Info("dynamo_lite_process", "Which process this is.", registry=registry)
    whose.info({"dynamo_namespace": spec.namespace, "dynamo_component": spec.component})
    remaining = Gauge(
        "dynamo_lite_lease_remaining_seconds",
        "Seconds until this process's lease may expire.",
        registry=registry,
    )
    remaining.set_function(lease.remaining_s)
    if not spec.nats_url:
        return
    connected = Gauge("dynamo_lite_nats_connected", "1 while NATS is connected.", registry=registry)
    connected.set_function(lambda: float(messaging.connected))


def count_reconnects(
    registry: CollectorRegistry, messaging: Messaging
) -> AbstractContextManager[None]:
    """Counts reconnects while the context lasts. The gauge `dynamo_lite_nats_connected` misses
    outages between two scrapes."""
    reconnects = Counter(
        "dynamo_lite_nats_reconnects",
        "How often the connection to NATS was lost and established again.",
        registry=registry,
    )

    def on_connection(connected: bool) -> None:
        if connected:
            reconnects.inc()

    return messaging.watch_connection(on_connection)
