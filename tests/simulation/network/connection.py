"""Connections between two simulated processes, and how they are made: ordered, without gaps.

While the two are partitioned, sent items wait. They are delivered when the partition ends, or
lost when an end gives up.
"""

import contextvars
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation.loop.process import SimHandle, SimProcess, SimState

if TYPE_CHECKING:
    from tests.simulation.loop.process import SimHandle
    from tests.simulation.network.network import Network


#: Range of seconds after which a connection breaks when its peer is unreachable.
CUT_BREAKS_S = (6.0, 15.0)
_MOST_RETRANSMIT_S = 0.4


class _Fin:
    def __init__(self, why: str):
        self.why = why


class End:
    """A process's end of a connection. States: open -> closed."""

    def __init__(self, network: "Network", process: SimProcess, context: contextvars.Context):
        self.network = network
        self.process = process
        self.context = context
        self.is_open = True
        #: Called with each item of the peer. While it is None, items wait.
        self.on_item: Callable[[Any], None] | None = None
        #: Called once with the reason, unless this end itself closed; "" for an orderly close.
        self.on_closed: Callable[[str], None] | None = None
        #: Range of seconds after which this end closes the connection when the peer is paused or
        #: unreachable. None: only a partition breaks it (see CUT_BREAKS_S).
        self.silence_s: tuple[float, float] | None = None
        self.peer: End
        self._waiting: deque[Any] = deque()  # arrived before there was an on_item
        self._held: deque[Any] = deque()  # sent while cut off
        self._last_arrival = 0.0  # at the peer
        self._give_up: SimHandle | None = None

    def join(self, peer: "End", *, at: float) -> None:
        """Makes the two one connection; nothing arrives here before `at`."""
        self.peer, peer.peer = peer, self
        peer._last_arrival = at
        self.network.ends |= {self: None, peer: None}

    def send(self, item: Any) -> None:
        """Arrives at the peer in order, or never. Dropped when this end is closed."""
        if not self.is_open or self.process.dead:
            return
        self._send(item)

    def close(self) -> None:
        """Closes in order: the peer sees it after everything that was sent."""
        self._close("", fin=_Fin(""))

    def abort(self) -> None:
        """Closes with a reset."""
        self._close("", fin=_Fin("connection reset by peer"))

    def start(
        self, on_item: Callable[[Any], None], on_closed: Callable[[str], None] | None = None
    ) -> None:
        """Sets both callbacks, and delivers the items that wait."""
        self.on_item, self.on_closed = on_item, on_closed
        while self._waiting and self.is_open:
            self._take(self._waiting.popleft())

    # Called by the network

    def owner_died(self) -> None:
        """Items that it has sent still arrive. Then its kernel closes the connection, or resets
        it if there was unread data."""
        unread = self.network.random() < 0.5
        self._close("", fin=_Fin("connection reset by peer" if unread else ""))

    def reconsider(self) -> None:
        """To be called when partitions have changed, or a process was paused or resumed."""
        cut = self.network.is_cut(self.process.host, self.peer.process.host)
        if not cut and self._held:
            self._flush()
        if not self.is_open:
            return
        mute = cut or (self.silence_s is not None and self.peer.process.state is SimState.PAUSED)
        if mute and self._give_up is None:
            low, high = self.silence_s or CUT_BREAKS_S
            after_s = low + (high - low) * self.network.random()
            self._give_up = self.network.loop.call_later(
                after_s, self._gave_up, context=self.context
            )
        elif not mute and self._give_up is not None:
            self._give_up.cancel()
            self._give_up = None

    def _send(self, item: Any) -> None:
        network, peer = self.network, self.peer
        if self._held or network.is_cut(self.process.host, peer.process.host):
            self._held.append(item)
            return
        arrival = network.loop.time() + network.delay_s()
        if arrival < self._last_arrival:
            arrival = self._last_arrival
        else:
            self._last_arrival = arrival
        network.loop.call_at(arrival, peer._arrive, item, context=peer.context)

    def _flush(self) -> None:
        held, self._held = self._held, deque()
        again_at = self.network.loop.time() + _MOST_RETRANSMIT_S * self.network.random()
        self._last_arrival = max(self._last_arrival, again_at)
        for item in held:
            self._send(item)
        if not self.is_open:
            self.network.ends.pop(self, None)

    def _arrive(self, item: Any) -> None:
        if not self.is_open:
            return
        if self.on_item is None or self._waiting:
            self._waiting.append(item)
        else:
            self._take(item)

    def _take(self, item: Any) -> None:
        if isinstance(item, _Fin):
            self._break(item.why, fin=None)
        else:
            assert self.on_item is not None
            self.on_item(item)

    def _gave_up(self) -> None:
        self._give_up = None
        why = "the peer does not answer"
        self.network.loop.trace.add(f"network: gave up {self.peer.process}: {why}")
        self._break(why, fin=_Fin("connection reset by peer"))

    def _break(self, why: str, *, fin: _Fin | None) -> None:
        """Closes, and says so."""
        on_closed = self.on_closed
        self._close(why, fin=fin)
        if on_closed is not None:
            on_closed(why)

    def _close(self, why: str, *, fin: _Fin | None) -> None:
        if not self.is_open:
            return
        if fin is not None:
            if fin.why and self._held:
                self._held.clear()
            self._send(fin)
        self.is_open = False
        if self._give_up is not None:
            self._give_up.cancel()
            self._give_up = None
        # Without reference cycles a connection is freed at its end, and the garbage collector has
        # little to do at the end of the run.
        self.on_item = self.on_closed = None
        if not self._held:
            self.network.ends.pop(self, None)
            if not (self.peer.is_open or self.peer._held):
                del self.peer.peer


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
        if self._network.listeners.get(self.port) is self:
            del self._network.listeners[self.port]


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
        listener = network.listeners.get(self._port)
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
