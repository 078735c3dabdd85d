"""The connection of a simulated gRPC channel: when it is made, given up and made again."""

from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from tests.simulation.loop.handles import SimHandle
from tests.simulation.network.channel import End
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

    def __repr__(self) -> str:
        return f"GrpcConnection({self._process} -> {self._port}, {self.state.name})"

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
