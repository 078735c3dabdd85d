"""What the etcd client runs on: gRPC channels, a thread for the lease, and clocks.

The only place where the client opens a connection or starts a thread. A simulation
replaces all three.
"""

from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from aetcd import rpc
from anyio.from_thread import start_blocking_portal

from dynamo_lite.runtime.address import ServerAddress, host_port
from dynamo_lite.runtime.clock import SYSTEM_CLOCK, Clock

#: gRPC's defaults need 5 s to reconnect after an outage, and never detect a server that hangs:
#: without the ping timeout the keepalive does not fire.
_CHANNEL_OPTIONS = {
    "grpc.initial_reconnect_backoff_ms": 100,
    # In spite of its name, this is the timeout of one try. A server that hangs accepts
    # connections, and continues the handshake when it resumes.
    "grpc.min_reconnect_backoff_ms": 1000,
    "grpc.max_reconnect_backoff_ms": 400,
    "grpc.keepalive_time_ms": 5000,
    "grpc.keepalive_timeout_ms": 2000,
    "grpc.http2.ping_timeout_ms": 2000,
    # Snapshots of a large prefix exceed the default of 4 MiB.
    "grpc.max_receive_message_length": 64 << 20,
    # Two stores of one process share neither a connection nor its backoff.
    "grpc.use_local_subchannel_pool": 1,
}


class Portal(Protocol):
    """Runs functions in an event loop, possibly of another thread, like anyio's BlockingPortal."""

    def start_task_soon(self, func: Callable[..., Any], *args: Any) -> Future[Any]:
        """Calls `func` there. The future has its result, awaited if it is awaitable."""
        ...


def open_channel(host: tuple[str, int], address: ServerAddress) -> Any:
    """The `grpc.aio.Channel` to one of `address.hosts`; it connects when it is first used.

    Raises ConfigError when a file of `address.tls` cannot be read.
    """
    target, options = host_port(*host), list(_CHANNEL_OPTIONS.items())
    if address.tls is None:
        return rpc.insecure_channel(target, options=options)
    credentials = grpc.ssl_channel_credentials(*address.tls.read())
    return rpc.secure_channel(target, credentials, options=options)


@asynccontextmanager
async def open_thread() -> AsyncIterator[Portal]:
    """A thread with an event loop of its own; leaving the context waits for its end."""
    with start_blocking_portal(name="dynamo-lite-lease") as portal:
        yield portal


@dataclass(frozen=True, kw_only=True)
class EtcdBackend:
    """open_channel: see `open_channel`. open_portal: a portal to an event loop that goes on
    running when the caller's stalls. clock: its boot time measures leases."""

    open_channel: Callable[[tuple[str, int], ServerAddress], Any] = open_channel
    open_portal: Callable[[], AbstractAsyncContextManager[Portal]] = open_thread
    clock: Clock = SYSTEM_CLOCK


SYSTEM_BACKEND = EtcdBackend()
