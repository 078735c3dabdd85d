"""How a simulated connection is made: listeners, and attempts to connect to them."""

import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation.loop.handles import SimHandle
from tests.simulation.loop.process import SimProcess
from tests.simulation.network.channel import End

if TYPE_CHECKING:
    from tests.simulation.network.network import Network

#: Seconds between two SYNs during a partition, and how many are sent.
_RETRY_S = 1.0
_TRIES = 60


class SimListener:
    def __init__(
        self, network: "Network", process: SimProcess, port: int, on_accept: Callable[[End], None]
    ):
        self._network = network
        self.process = process
        self.port = port
        self.on_accept = on_accept
        self.context = contextvars.copy_context()

    def close(self) -> None:
        self._network.forget_listener(self)


class Dial:
    """One attempt to connect. The kernel of a paused process answers all the same."""

    def __init__(
        self,
        network: "Network",
        process: SimProcess,
        port: int,
        on_open: Callable[[End], None],
        on_error: Callable[[OSError], None],
    ):
        self._network = network
        self._process = process
        self._port = port
        self._on_open = on_open
        self._on_error = on_error
        self._context = contextvars.copy_context()
        self._tries = 0
        #: The open connection until `on_open` has it.
        self._end: End | None = None
        #: Until one of the two callbacks is called.
        self._timer: SimHandle | None = network.call_at(
            network.loop.time() + network.delay_s(), self._reach
        )

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._end is not None:
            self._end.abort()

    def _reach(self) -> None:
        network, process = self._network, self._process
        if process.dead:
            return
        now = network.loop.time()
        back_at = now + network.delay_s()
        listener = network.listener_at(self._port)
        if listener is not None and network.is_cut(process.host, listener.process.host):
            self._tries += 1
            if self._tries < _TRIES:
                self._timer = network.call_at(now + _RETRY_S, self._reach)
            else:
                self._answer(back_at, self._on_error, TimeoutError("connection timed out"))
        elif listener is None:
            self._answer(back_at, self._on_error, ConnectionRefusedError("connection refused"))
        else:
            mine = self._end = End(network, process, self._context)
            theirs = End(network, listener.process, listener.context)
            mine.join(theirs, at=back_at)
            network.loop.call_soon(listener.on_accept, theirs, context=listener.context)
            self._answer(back_at, self._opened, mine)

    def _opened(self, end: End) -> None:
        self._end = self._timer = None
        self._on_open(end)

    def _answer(self, when: float, function: Callable[..., None], what: Any) -> None:
        self._timer = self._network.loop.call_at(when, function, what, context=self._context)
