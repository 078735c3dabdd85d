"""Messages that were refused as malformed or out of place, counted by where they arrived."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter

from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.runtime.messaging import Handler

#: Takes the place at which a message was dropped: one of a few fixed words.
OnDrop = Callable[[str], None]


def uncounted(where: str) -> None:
    """The OnDrop of whoever has nobody to tell."""


class DropCounter:
    """An OnDrop: one process's counter of dropped messages."""

    def __init__(self, registry: CollectorRegistry):
        self._counter = Counter(
            "dynamo_lite_dropped_messages",
            "Messages that were refused as malformed or out of place, by where they arrived",
            ["where"],
            registry=registry,
        )

    def __call__(self, where: str) -> None:
        self._counter.labels(where).inc()


def counted(handler: Handler, where: str, on_drop: OnDrop) -> Handler:
    """`handler`, whose ProtocolErrors are counted on their way to whoever called it."""

    async def handle(payload: bytes) -> bytes | None:
        try:
            return await handler(payload)
        except ProtocolError:
            on_drop(where)
            raise

    return handle
