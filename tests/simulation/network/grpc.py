"""gRPC over the simulated network: the client's channel, and the errors of both sides.

`SimChannel` behaves as a `grpc.aio.Channel` as far as etcd's stubs need it. Requests and
responses are the stubs' own protobuf messages. They are not serialised: a message is never
changed after it was sent.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from aetcd import rpc
from grpc.aio import Metadata

from tests.simulation.loop.process import SimHandle
from tests.simulation.network.connection import End
from tests.simulation.network.network import Network

#: With the options of `runtime/etcd/client.py`: the time for one try to connect, the pause after
#: a try that failed, and the silence of the server after which the connection is given up.
_CONNECT_S = 1.0
_BACKOFF_S = (0.1, 0.4)
_SILENCE_S = (5.0, 7.0)
#: Error text of calls that begin or wait while there is no connection.
NO_CONNECTION = "failed to connect to all addresses; last error: UNKNOWN: Connection refused"
#: In the place of a method: the client does not want the call any more.
CANCEL = "cancel"


class SimChannel:
    """Belongs to the process in which it was made. Connects to `port` at the first call, and
    again at the next call after the connection has broken.

    Calls wait while it connects for the first time. After a try that failed more follow by
    themselves, and calls fail at once until one succeeds.
    """

    def __init__(self, network: Network, port: int):
        self._network, self._port, self.loop = network, port, network.loop
        self._process = network.loop.current_process()
        self._end: End | None = None
        self._failing = False
        #: While it connects: of the try, or of the pause before the next one.
        self._timer: SimHandle | None = None
        self._give_up: Callable[[], None] | None = None
        self._last_number = 0
        self._calls: dict[int, _Call] = {}  # those that have not ended, oldest first

    # What the stubs ask for

    def unary_unary(self, method: str, **_: Any) -> Callable[..., Coroutine[Any, Any, Any]]:
        def call(request: Any, *, timeout: float | None = None, **_: Any) -> Any:
            return _Call(self, method, request, timeout).answer()

        return call

    def stream_stream(self, method: str, **_: Any) -> "Callable[..., _Call]":
        def call(
            requests: Iterable[Any] = (), *, timeout: float | None = None, **_: Any
        ) -> "_Call":
            return _Call(self, method, *requests, timeout_s=timeout)

        return call

    async def close(self, grace: float | None = None) -> None:
        self._stop_connecting()
        self._failing = True
        end, self._end = self._end, None
        if end is not None:
            end.close()
        for call in list(self._calls.values()):
            call.fail(asyncio.CancelledError())

    # What the calls ask for

    def begin(self, call: "_Call") -> int:
        """Sends its request, now or when the channel is connected. Returns its number."""
        self._last_number += 1
        self._calls[self._last_number] = call
        if self._end is not None:
            self._send(self._last_number, call)
        elif self._failing:
            self.loop.call_soon(call.fail, _unavailable(NO_CONNECTION))
        elif self._timer is None:
            self._connect()
        return self._last_number

    def forget(self, number: int, *, tell: bool = False) -> None:
        """tell: the server, unless that has ended the call."""
        call = self._calls.pop(number, None)
        if call is not None and call.sent and tell and self._end is not None:
            self._end.send((number, CANCEL, None))

    def _send(self, number: int, call: "_Call") -> None:
        assert self._end is not None
        self._end.send((number, call.method, call.request))
        call.sent = True

    # The connection

    def _connect(self) -> None:
        self._timer = self.loop.call_later(_CONNECT_S, self._not_connected)
        self._give_up = self._network.dial(
            self._process, self._port, self._opened, lambda _: self._not_connected()
        ).cancel

    def _opened(self, end: End) -> None:
        # The kernel of a server that is stopped accepts, but the server says no hello.
        self._give_up, end.silence_s = end.abort, _SILENCE_S
        end.start(lambda _: self._greeted(end), lambda _: self._not_connected())

    def _greeted(self, end: End) -> None:
        self._give_up = None
        self._stop_connecting()
        self._end, self._failing = end, False
        end.start(self._take, self._broken)
        for number, call in self._calls.items():
            self._send(number, call)

    def _not_connected(self) -> None:
        self._stop_connecting()
        self._failing = True
        low, high = _BACKOFF_S
        after_s = low + (high - low) * self._network.random()
        self._timer = self.loop.call_later(after_s, self._connect)
        self._fail_all(NO_CONNECTION)

    def _stop_connecting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        give_up, self._timer, self._give_up = self._give_up, None, None
        if give_up is not None:
            give_up()

    def _broken(self, why: str) -> None:
        self._end = None
        self._fail_all(why or "Socket closed")

    def _take(self, item: tuple[int, Any, bool]) -> None:
        """An answer: the call's number, a response or an error, and whether the call has ended."""
        number, response, ended = item
        call = self._calls.get(number)
        if call is None:
            return
        if isinstance(response, rpc.AioRpcError):
            call.fail(response)
            return
        if ended:
            self.forget(number)
        call.take(response)

    def _fail_all(self, why: str) -> None:
        for call in list(self._calls.values()):
            call.fail(_unavailable(why))


class _Call:
    """With one request, given at the start or by `write`. timeout_s: until its end."""

    def __init__(
        self,
        channel: SimChannel,
        method: str,
        request: Any = None,
        timeout_s: float | None = None,
    ):
        self._channel, self.method = channel, method
        self.request: Any = None
        self.sent = False
        self._number = 0
        self._responses: deque[Any] = deque()
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self._timer: SimHandle | None = None
        if timeout_s is not None:
            late = rpc_error(rpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            self._timer = channel.loop.call_later(timeout_s, self.fail, late)
        if request is not None:
            self._begin(request)

    async def write(self, request: Any) -> None:
        """Returns when it is on its way, or will be as soon as the channel is connected."""
        self._begin(request)

    async def read(self) -> Any:
        """The next response. Raises AioRpcError, and CancelledError after `cancel`."""
        while not self._responses:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        return self._responses.popleft()

    async def answer(self) -> Any:
        """The only response."""
        try:
            return await self.read()
        finally:
            self.cancel()

    def __aiter__(self) -> "_Call":
        return self

    __anext__ = answer

    def cancel(self) -> None:
        self._channel.forget(self._number, tell=True)
        self._end(asyncio.CancelledError())

    # Called by the channel

    def take(self, response: Any) -> None:
        self._responses.append(response)
        self._changed.set()

    def fail(self, error: BaseException) -> None:
        self._channel.forget(self._number)
        self._end(error)

    def _begin(self, request: Any) -> None:
        self.request = request
        self._number = self._channel.begin(self)

    def _end(self, error: BaseException) -> None:
        self._error = self._error or error
        self._changed.set()
        if self._timer is not None:
            self._timer.cancel()


def rpc_error(code: rpc.StatusCode, details: str) -> rpc.AioRpcError:
    return rpc.AioRpcError(code, Metadata(), Metadata(), details)


def _unavailable(why: str) -> rpc.AioRpcError:
    return rpc_error(rpc.StatusCode.UNAVAILABLE, why)
