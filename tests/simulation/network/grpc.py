"""gRPC over the simulated network: the client's channel, and the errors of both sides.

`SimChannel` behaves as a `grpc.aio.Channel` as far as etcd's stubs need it. Requests and
responses are the stubs' own protobuf messages. They are not serialised: a message is never
changed after it was sent.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Any

from aetcd import rpc
from grpc.aio import Metadata, UsageError

from tests.simulation.loop.process import SimHandle
from tests.simulation.network.connection import End
from tests.simulation.network.network import Dial, Network

#: With the options of `runtime.etcd_backend`: the time for one try to connect, the pause after
#: a try that failed, and the silence of the server after which the connection is given up.
_CONNECT_S = 1.0
_BACKOFF_S = (0.1, 0.4)
_SILENCE_S = (5.0, 7.0)
#: Error text of calls that begin or wait while there is no connection.
NO_CONNECTION = "failed to connect to all addresses; last error: UNKNOWN: Connection refused"


class ConnectivityState(Enum):
    """As gRPC's connectivity states."""

    IDLE = auto()  # the next call connects
    CONNECTING = auto()  # calls wait
    FAILING = auto()  # the last try failed, more follow by themselves; calls fail at once
    READY = auto()
    SHUTDOWN = auto()


class GrpcConnection:
    """Belongs to the process in which it was made.

    on_ready: called when the server has greeted. on_item: takes what the server sends. on_lost:
    called with the reason when a try to connect has failed or the connection is broken.
    """

    def __init__(
        self,
        network: Network,
        port: int,
        *,
        on_ready: Callable[[], None],
        on_item: Callable[[Any], None],
        on_lost: Callable[[str], None],
    ):
        self._network, self._port = network, port
        self._loop = network.loop
        self._process = network.loop.current_process()
        self._on_ready, self._on_item, self._on_lost = on_ready, on_item, on_lost
        self.state = ConnectivityState.IDLE
        self._end: End | None = None
        self._dialling: Dial | None = None
        self._ungreeted: End | None = None
        self._timer: SimHandle | None = None

    def connect(self) -> None:
        """Begins to connect if the state is IDLE."""
        if self.state is ConnectivityState.IDLE:
            self.state = ConnectivityState.CONNECTING
            self._dial()

    def send(self, item: Any) -> None:
        """Dropped while there is no connection."""
        if self._end is not None:
            self._end.send(item)

    def close(self) -> None:
        self._stop_dialling()
        self.state = ConnectivityState.SHUTDOWN
        end, self._end = self._end, None
        if end is not None:
            end.close()

    def _dial(self) -> None:
        self._timer = self._loop.call_later(_CONNECT_S, self._not_connected)
        self._dialling = self._network.dial(
            self._process, self._port, self._opened, lambda _: self._not_connected()
        )

    def _opened(self, end: End) -> None:
        # The kernel of a server that is stopped accepts, but the server says no hello.
        self._dialling, self._ungreeted = None, end
        end.silence_s = _SILENCE_S
        end.start(lambda _: self._greeted(end), lambda _: self._not_connected())

    def _greeted(self, end: End) -> None:
        self._ungreeted = None
        self._stop_dialling()
        self._end, self.state = end, ConnectivityState.READY
        end.start(self._on_item, self._broken)
        self._on_ready()

    def _not_connected(self) -> None:
        self._stop_dialling()
        self.state = ConnectivityState.FAILING
        low, high = _BACKOFF_S
        after_s = low + (high - low) * self._network.random()
        self._timer = self._loop.call_later(after_s, self._dial)
        self._on_lost(NO_CONNECTION)

    def _broken(self, why: str) -> None:
        self._end, self.state = None, ConnectivityState.IDLE
        self._on_lost(why or "Socket closed")

    def _stop_dialling(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._dialling is not None:
            self._dialling.cancel()
            self._dialling = None
        if self._ungreeted is not None:
            self._ungreeted.abort()
            self._ungreeted = None


class SimChannel:
    """Belongs to the process in which it was made. Connects to `port` at the first call."""

    def __init__(self, network: Network, port: int):
        self._loop = network.loop
        self._connection = GrpcConnection(
            network, port, on_ready=self._send_waiting, on_item=self._take, on_lost=self._fail_all
        )
        self._last_number = 0
        self._calls: dict[int, _Call] = {}  # those that have not ended, oldest first

    # What the stubs ask for

    def unary_unary(self, method: str, **_: Any) -> Callable[..., Any]:
        def call(request: Any, *, timeout: float | None = None, **_: Any) -> Any:
            return self.ask(method, request, timeout)

        return call

    def stream_stream(self, method: str, **_: Any) -> Callable[..., Any]:
        def call(
            requests: Iterable[Any] | None = None, *, timeout: float | None = None, **_: Any
        ) -> "_Stream | _Answers":
            if requests is not None:
                return _Answers(self, method, requests, timeout)
            return _Stream(self, method)

        return call

    def unary_stream(self, method: str, **_: Any) -> None:
        """No stub that is used calls one."""

    async def close(self, grace: float | None = None) -> None:
        self._connection.close()
        for number in list(self._calls):
            self._fail(number, asyncio.CancelledError())

    # What the calls ask for

    async def ask(self, method: str, request: Any, timeout_s: float | None) -> Any:
        """The response to one request. Raises AioRpcError."""
        if self._connection.state is ConnectivityState.FAILING:
            await asyncio.sleep(0)
            raise rpc_error(rpc.StatusCode.UNAVAILABLE, NO_CONNECTION)
        answer: asyncio.Future[Any] = self._loop.create_future()

        def on_message(response: Any) -> None:
            if not answer.done():
                answer.set_result(response)

        def on_error(error: BaseException) -> None:
            if not answer.done():
                answer.set_exception(error)

        call = _Call(on_message, on_error)
        number = self.begin(call, "unary", method, request)
        timer = None
        if timeout_s is not None:
            timer = self._loop.call_later(timeout_s, self._time_out, number)
        try:
            return await answer
        finally:
            if timer is not None:
                timer.cancel()
            self._calls.pop(number, None)

    def begin(self, call: "_Call", kind: str, method: str, what: Any) -> int:
        """Sends (kind, number, method, what), now or when the channel is connected.

        Returns the call's number. `call.on_error` is called at its end unless it is dropped
        before.
        """
        self._last_number += 1
        number = self._last_number
        match self._connection.state:
            case ConnectivityState.READY:
                self._connection.send((kind, number, method, what))
                call.sent = True
            case ConnectivityState.FAILING:
                refused = rpc_error(rpc.StatusCode.UNAVAILABLE, NO_CONNECTION)
                self._loop.call_soon(self._fail, number, refused)
            case ConnectivityState.SHUTDOWN:
                raise UsageError("Channel is closed.")
            case ConnectivityState.IDLE | ConnectivityState.CONNECTING:
                call.unsent = (kind, number, method, what)
                self._connection.connect()
        self._calls[number] = call
        return number

    def send_more(self, number: int, method: str, what: Any) -> None:
        """Of a call that was sent."""
        self._connection.send(("stream", number, method, what))

    def drop(self, number: int) -> None:
        """The caller does not want it any more."""
        call = self._calls.pop(number, None)
        if call is not None and call.sent:
            self._connection.send(("cancel", number))

    # What the connection reports

    def _send_waiting(self) -> None:
        for call in self._calls.values():
            if call.unsent is not None:
                self._connection.send(call.unsent)
                call.unsent, call.sent = None, True

    def _take(self, item: Any) -> None:
        match item:
            case ("answer", number, None, response):
                call = self._calls.pop(number, None)
                if call is not None:
                    call.on_message(response)
            case ("answer", number, error, _):
                self._fail(number, error)
            case ("message", number, response):
                call = self._calls.get(number)
                if call is not None:
                    call.on_message(response)

    def _time_out(self, number: int) -> None:
        self._fail(number, rpc_error(rpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _fail(self, number: int, error: BaseException) -> None:
        call = self._calls.pop(number, None)
        if call is not None:
            call.on_error(error)

    def _fail_all(self, why: str) -> None:
        for number in list(self._calls):
            self._fail(number, rpc_error(rpc.StatusCode.UNAVAILABLE, why))


class _Call:
    """on_message: takes each response. on_error: takes the error that ends it."""

    __slots__ = ("on_error", "on_message", "sent", "unsent")

    def __init__(
        self, on_message: Callable[[Any], None], on_error: Callable[[BaseException], None]
    ):
        self.on_message, self.on_error = on_message, on_error
        self.unsent: tuple[Any, ...] | None = None
        self.sent = False


class _Answers:
    """A stream with all requests given at the start; each is answered by one response."""

    def __init__(
        self, channel: SimChannel, method: str, requests: Iterable[Any], timeout_s: float | None
    ):
        self._channel, self._method = channel, method
        self._requests, self._timeout_s = iter(requests), timeout_s

    def __aiter__(self) -> "_Answers":
        return self

    async def __anext__(self) -> Any:
        for request in self._requests:
            return await self._channel.ask(self._method, request, self._timeout_s)
        raise StopAsyncIteration


class _Stream:
    """A stream that is written and read. States: new -> open -> ended or cancelled."""

    def __init__(self, channel: SimChannel, method: str):
        self._channel, self._method = channel, method
        self._number = 0
        self._responses: deque[Any] = deque()
        self._error: BaseException | None = None
        self._cancelled = False
        self._reader: asyncio.Future[None] | None = None

    async def write(self, request: Any) -> None:
        """Returns when it is on its way, or will be as soon as the channel is connected."""
        self._raise_if_ended()
        if self._number:
            self._channel.send_more(self._number, self._method, request)
        else:
            call = _Call(self._responses_append, self._ended)
            self._number = self._channel.begin(call, "stream", self._method, request)

    async def read(self) -> Any:
        """The next response. Raises AioRpcError, and CancelledError after `cancel`."""
        while not self._responses:
            self._raise_if_ended()
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            except asyncio.CancelledError:
                self.cancel()
                raise
            finally:
                self._reader = None
        return self._responses.popleft()

    def cancel(self) -> bool:
        if self._cancelled or self._error is not None:
            return False
        self._cancelled = True
        self._channel.drop(self._number)
        self._wake()
        return True

    def _responses_append(self, response: Any) -> None:
        self._responses.append(response)
        self._wake()

    def _ended(self, error: BaseException) -> None:
        self._error = error
        self._wake()

    def _raise_if_ended(self) -> None:
        if self._error is not None:
            raise self._error
        if self._cancelled:
            raise asyncio.CancelledError

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def rpc_error(code: rpc.StatusCode, details: str) -> rpc.AioRpcError:
    return rpc.AioRpcError(code, Metadata(), Metadata(), details)
