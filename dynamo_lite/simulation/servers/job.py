"""A job as a simulated process has pulled it."""

from collections.abc import Callable
from typing import Any

from dynamo_lite.protocol.backlog import Lane
from dynamo_lite.protocol.errors import BrokerUnavailable
from dynamo_lite.simulation.servers.link import LinkDown, ServerLink


class SimJob:
    """Implements Job. lane: where it waited. arrived_at: loop time. max_deliver: see
    `QueueConfig`.

    on_end: called when its holder is done with it.
    """

    def __init__(
        self,
        link: ServerLink,
        stream: str,
        told: tuple[bytes, int, int, Lane],
        *,
        arrived_at: float,
        timeout_s: float,
        max_deliver: int,
        on_end: "Callable[[SimJob], None]",
    ):
        self._link = link
        self._stream = stream
        self._timeout_s = timeout_s
        self._on_end = on_end
        self._ended = False
        self.payload, self.sequence, self.deliveries, self.lane = told
        self.deliveries_left = max_deliver - self.deliveries
        self.arrived_at = arrived_at

    def __repr__(self) -> str:
        state = "ended" if self._ended else "held"
        return f"<SimJob {state} sequence={self.sequence} deliveries={self.deliveries}>"

    async def ack(self) -> None:
        await self._end("ack")

    async def term(self) -> None:
        await self._end("term")

    async def nak(self, *, delay_s: float = 0.0) -> None:
        self.give_back(delay_s)

    def give_back(self, delay_s: float = 0.0) -> None:
        """As `nak`, which waits for nothing."""
        if not self._ended:
            try:
                self._say("nak", delay_s)
            finally:
                self._on_end(self)
            self._ended = True

    async def extend(self) -> None:
        if not self._ended:
            self._say("extend")

    async def _end(self, verdict: str) -> None:
        if self._ended:
            return
        about = (self._stream, self.sequence, self.deliveries)
        try:
            await self._link.call(
                verdict, *about, timeout_s=self._timeout_s, loosely=True, outlives_link=True
            )
        except (LinkDown, TimeoutError, LookupError) as exc:
            raise BrokerUnavailable(f"job {self.sequence}: {exc!r}") from exc
        else:
            self._ended = True
        finally:
            self._on_end(self)

    def _say(self, verdict: str, *more: Any) -> None:
        try:
            about = (self._stream, self.sequence, self.deliveries)
            self._link.send((verdict, *about, *more), loosely=True)
        except LinkDown as exc:
            raise BrokerUnavailable(f"job {self.sequence}: NATS is disconnected") from exc
