"""A job that JetStream has delivered."""

from collections.abc import Callable

import msgspec
from nats import errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from dynamo_lite.protocol.errors import BrokerUnavailable


class JetStreamJob:
    """Implements Job.

    arrived_at: event loop time. timeout_s: for the broker's confirmation. max_deliver: see
    `QueueConfig`. on_end: called after ack, nak or term, also if the broker did not get it.
    """

    def __init__(
        self,
        client: Client,
        message: Msg,
        arrived_at: float,
        timeout_s: float,
        max_deliver: int,
        on_end: "Callable[[JetStreamJob], None]",
    ):
        self._client = client
        self._reply = message.reply
        self._timeout_s = timeout_s
        self._on_end = on_end
        self._ended = False
        self.arrived_at = arrived_at
        self.payload = message.data
        self.sequence: int = message.metadata.sequence.stream
        self.deliveries: int = message.metadata.num_delivered or 1
        self.deliveries_left = max_deliver - self.deliveries

    def __repr__(self) -> str:
        state = "ended" if self._ended else "held"
        return f"<JetStreamJob {state} sequence={self.sequence} deliveries={self.deliveries}>"

    async def ack(self) -> None:
        await self._end(b"+ACK", confirmed=True)

    async def nak(self, *, delay_s: float = 0.0) -> None:
        delay = msgspec.json.encode({"delay": int(delay_s * 1e9)}) if delay_s > 0 else b""
        await self._end(b"-NAK " + delay if delay else b"-NAK", confirmed=False)

    async def term(self) -> None:
        await self._end(b"+TERM", confirmed=True)

    async def extend(self) -> None:
        if not self._ended:
            await self._send(b"+WPI", confirmed=False)

    async def _end(self, verdict: bytes, *, confirmed: bool) -> None:
        if self._ended:
            return
        try:
            await self._send(verdict, confirmed=confirmed)
        except BrokerUnavailable:
            self._on_end(self)
            raise
        self._ended = True
        self._on_end(self)

    async def _send(self, text: bytes, *, confirmed: bool) -> None:
        if not self._client.is_connected:
            raise BrokerUnavailable(f"job {self.sequence}: NATS is disconnected")
        try:
            if confirmed:
                await self._client.request(self._reply, text, timeout=self._timeout_s)
            else:
                await self._client.publish(self._reply, text)
        except (errors.Error, OSError) as exc:
            reason = str(exc) or type(exc).__name__
            raise BrokerUnavailable(f"job {self.sequence}: {reason}") from exc
