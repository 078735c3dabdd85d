"""What a decode engine produces goes to the Frontends and the routers."""

from dynamo_lite.disagg.engine import DecodeEngine, KvEvents
from dynamo_lite.protocol.generate import TokenDelta
from dynamo_lite.protocol.prefill import decode_first_token
from dynamo_lite.request_plane.server import GenerateServer
from dynamo_lite.routing.kv_publisher import KvPublisher


class DecodeOutputs:
    """publisher: None for a worker that no router follows."""

    def __init__(self, engine: DecodeEngine, server: GenerateServer, publisher: KvPublisher | None):
        self._engine, self._server, self._publisher = engine, server, publisher

    async def send_steps(self) -> None:
        """Raises EngineDied."""
        async for deltas in self._engine.steps():
            self._send(deltas)

    async def on_first_token(self, payload: bytes) -> None:
        """A message of a prefill worker."""
        delta = self._engine.first_token(decode_first_token(payload))
        if delta is not None:
            self._send([delta])

    def _send(self, deltas: list[TokenDelta]) -> None:
        self._server.deliver(deltas)
        if self._publisher is not None:
            self._publisher.load_changed()


async def publish_changes(events: KvEvents, publisher: KvPublisher) -> None:
    async for changes in events.changes():
        publisher.changed(changes)
