"""A client's connection to a simulated server: calls, messages, and its way back.

It is made again whenever it breaks. No task belongs to it.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from dynamo_lite.simulation.loop.handles import SimHandle
from dynamo_lite.simulation.loop.process import SimProcess
from dynamo_lite.simulation.network.channel import End
from dynamo_lite.simulation.network.network import Dial, Network

_RETRY_S = (0.1, 0.3)
_DIAL_TIMEOUT_S = 2.0


class LinkDown(Exception):
    """There is no connection, or it broke before the answer came."""


class ServerLink:
    """States: new -> (down <-> up) -> closed.

    port: of the server. silence_s: see `End`. on_push: takes what the server sends on
    its own. on_state: called as (up) after every change; what is sent in it is the
    first that the server gets.
    """

    def __init__(
        self,
        network: Network,
        process: SimProcess,
        port: int,
        *,
        silence_s: tuple[float, float],
        on_push: Callable[[Any], None] = lambda _: None,
        on_state: Callable[[bool], None] = lambda _: None,
    ):
        self._network = network
        self._loop = network.loop
        self._process = process
        self._port = port
        self._silence_s = silence_s
        self._on_push, self._on_state = on_push, on_state
        self._end: End | None = None
        self._dialling: Dial | None = None
        self._ungreeted: End | None = None
        self._timer: SimHandle | None = None
        self._closed = False
        self._calls = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._up: asyncio.Future[None] = self._loop.create_future()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "up" if self.up else "down"
        return f"ServerLink({self._process} -> {self._port}, {state})"

    @property
    def up(self) -> bool:
        return self._end is not None

    async def open(self, timeout_s: float) -> None:
        """Raises TimeoutError; the link must be closed then, too."""
        self._process.run(self._dial)
        async with asyncio.timeout(timeout_s):
            await asyncio.shield(self._up)

    def close(self) -> None:
        self._closed = True
        self._stop_dialling()
        end, self._end = self._end, None
        if end is not None:
            end.close()
            self._fail_calls()

    def send(self, item: Any) -> None:
        """Raises LinkDown; when it does not, the item may be lost all the same."""
        if self._end is None:
            raise LinkDown
        self._end.send(item)

    async def call(self, operation: str, *arguments: Any, timeout_s: float) -> Any:
        """The server's answer, or the error that it raised.

        Raises LinkDown and TimeoutError. After both the server may have done it or not.
        """
        self._calls += 1
        number = self._calls
        self.send(("call", number, operation, arguments))
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._waiting[number] = answer
        timer = self._loop.call_later(timeout_s, _set_timeout, answer)
        try:
            return await answer
        finally:
            timer.cancel()
            del self._waiting[number]

    def _dial(self) -> None:
        self._timer = self._loop.call_later(_DIAL_TIMEOUT_S, self._dial_later)
        self._dialling = self._network.dial(
            self._process, self._port, self._opened, lambda _: self._dial_later()
        )

    def _dial_later(self) -> None:
        self._stop_dialling()
        low, high = _RETRY_S
        after_s = low + (high - low) * self._network.random()
        self._timer = self._loop.call_later(after_s, self._dial)

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

    def _opened(self, end: End) -> None:
        # The kernel of a server that is stopped accepts, but the server says no hello.
        self._dialling, self._ungreeted = None, end
        end.silence_s = self._silence_s
        end.start(lambda _: self._greeted(end), lambda _: self._dial_later())

    def _greeted(self, end: End) -> None:
        self._ungreeted = None
        self._stop_dialling()
        self._end = end
        end.start(self._take, self._broken)
        self._on_state(True)
        if not self._up.done():
            self._up.set_result(None)

    def _broken(self, why: str) -> None:
        self._end = None
        self._fail_calls()
        self._dial_later()
        self._on_state(False)

    def _fail_calls(self) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(LinkDown())

    def _take(self, item: Any) -> None:
        match item:
            case ("answer", number, result, error):
                waiting = self._waiting.get(number)
                if waiting is None or waiting.done():
                    return
                if error is not None:
                    waiting.set_exception(error)
                else:
                    waiting.set_result(result)
            case _:
                self._on_push(item)


def _set_timeout(answer: asyncio.Future[Any]) -> None:
    if not answer.done():
        answer.set_exception(TimeoutError())
