"""Limits on connections without the head of an HTTP request: in time, and in number.

The servers' libraries have none.
"""

import asyncio
import resource
from typing import cast

from dynamo_lite.runtime.pending import PendingConnections

#: Clients that open connections in advance use them sooner, or open others in their place. Without
#: a limit connections that no client uses would hold the process's file descriptors for good.
HEAD_S = 30.0

#: Connections of one server without a request's head, those in their TLS handshake among them. A
#: burst of clients is connected before the first of them is read: more than two backlogs of 2048.
MAX_PENDING = 4096


def most_pending() -> int:
    """At most half of the file descriptors that this process may have."""
    return min(MAX_PENDING, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class RequestHeadDeadline(asyncio.Protocol):
    """Base class in front of a library's protocol.

    It disconnects a client whose new connection has no whole head within `HEAD_S`, or that has
    begun another request and does not finish its head. `pending` limits how many such clients
    there are. Connections that wait for another request are the library's. With TLS the handshake
    comes before, in `TcpServer`.
    """

    pending: PendingConnections

    _head_timer: asyncio.TimerHandle | None = None
    _client: asyncio.Transport

    def in_request(self) -> bool:
        """Whether a request's head is complete and its response is not."""
        raise AssertionError("each protocol has its own")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._client = cast("asyncio.Transport", transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.in_request():
            self._stop_waiting()
        else:
            self._await_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        # aiohttp's type is the wider one.
        self._stop_waiting()
        super().connection_lost(cast("Exception | None", exc))

    def _await_head(self) -> None:
        if self._head_timer is None:
            loop = asyncio.get_running_loop()
            self._head_timer = loop.call_later(HEAD_S, self._client.abort)
            peer = self._client.get_extra_info("peername")
            self.pending.add(self, peer[0] if peer else "", self._client.abort)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
            self.pending.discard(self)
