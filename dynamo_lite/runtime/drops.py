"""Counting of messages that are dropped as malformed or unexpected, by where they arrived."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter

from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.runtime.messaging import Handler

#: Takes where a message was dropped: one of a few fixed names.
OnDrop = Callable[[str], None]


def uncounted(where: str) -> None:
    """The OnDrop of users without a registry: does nothing."""


def drop_counter(registry: CollectorRegistry) -> OnDrop:
    """One process's counter of dropped messages."""
    counter = Counter(
        "dynamo_lite_dropped_messages",
        "Messages that were dropped as malformed or unexpected, by where they arrived",
        ["where"],
        registry=registry,
    )
    return lambda where: counter.labels(where).inc()


def counted(handler: Handler, where: str, on_drop: OnDrop) -> Handler:
    """Wraps `handler` so that its ProtocolErrors are counted before they are raised."""

    async def handle(payload: bytes) -> bytes | None:
        try:
            return await handler(payload)
        except ProtocolError:
            on_drop(where)
            raise

    return handle
