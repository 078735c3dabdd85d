"""The network between simulated processes: delays, faults, partitions, connections.

Hosts are cut off from each other, whatever runs there; connections and messages
belong to one incarnation of a process.
"""

import asyncio
import contextvars
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.simulation.loop.loop import VirtualLoop
from tests.simulation.loop.process import SimHandle, SimProcess, SimState
from tests.simulation.network.connection import Dial, End, SimListener
from tests.simulation.network.stream import StreamServer, StreamTransport

_FIRST_PORT = 20_000
#: Longest delay of a message that others overtake.
_REORDER_S = 0.05


@dataclass(frozen=True)
class Weather:
    """What messages meet on their way.

    delay_s: shortest one-way delay. spread_s: most that is added to it; long delays
    are rare. loss, duplicate, reorder: probabilities, for messages that are sent one
    by one and without a fixed order (`as_the_weather_is`); streams keep theirs.
    """

    delay_s: float = 0.0002
    spread_s: float = 0.002
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0


class Network:
    def __init__(self, loop: VirtualLoop):
        self.loop = loop
        #: May be replaced at any time; counts for what is sent from then on.
        self.weather = Weather()
        self.random = loop.stream("network").random
        #: How many cuts there are between two hosts, and those with any.
        self._counts: Counter[tuple[str, str]] = Counter()
        self._cuts: set[tuple[str, str]] = set()
        #: Open ones, and closed ones with items that wait for the end of a partition.
        self.ends: dict[End, None] = {}
        self._watched: dict[SimProcess, None] = {}
        #: By port.
        self.listeners: dict[int, SimListener] = {}
        #: Unix sockets: path to the port that stands for it.
        self.unix_sockets: dict[str, int] = {}
        self._numbers = 0
        self._nobody = contextvars.Context()
        loop.network = self

    # Delays and partitions

    def delay_s(self) -> float:
        """A one-way delay: mostly near the shortest one, now and then up to all of the spread."""
        weather = self.weather
        rare = self.random()
        rare *= rare
        rare *= rare
        return weather.delay_s + weather.spread_s * rare

    def is_cut(self, a: str, b: str) -> bool:
        cuts = self._cuts
        return bool(cuts) and a != b and not cuts.isdisjoint(((a, b), (b, a), (a, ""), (b, "")))

    def cut(self, a: str, b: str = "") -> None:
        """From now on nothing passes between the two; between `a` and any other if `b` is empty."""
        self.loop.trace.add(f"network: {a} is cut off from {b or 'all others'}")
        self._count_cut(a, b, 1)

    def heal(self, a: str, b: str = "") -> None:
        """Ends a `cut`. If there were several, the last one to end reconnects them."""
        self.loop.trace.add(f"network: a cut of {a} from {b or 'all others'} ends")
        self._count_cut(a, b, -1)

    def _count_cut(self, a: str, b: str, more: int) -> None:
        self._counts[a, b] += more
        self._cuts = {pair for pair, count in self._counts.items() if count}
        self._reconsider()

    # Single messages

    def as_the_weather_is(self, take: Callable[..., None], *args: Any) -> None:
        """Calls `take` for a message that has come: now, too late, twice or never."""
        weather = self.weather
        if weather.loss and self.random() < weather.loss:
            self.loop.trace.add("network: a message was lost")
            return
        if weather.reorder and self.random() < weather.reorder:
            self._call_late(take, *args)
        else:
            take(*args)
        if weather.duplicate and self.random() < weather.duplicate:
            self._call_late(take, *args)

    def _call_late(self, take: Callable[..., None], *args: Any) -> None:
        self.loop.call_later(self.delay_s() + _REORDER_S * self.random(), take, *args)

    # Connections

    def listen(
        self, process: SimProcess, on_accept: Callable[[End], None], port: int = 0
    ) -> SimListener:
        """Takes connections for `process`; `on_accept` is called in the current context.

        port: unique in the whole network; 0 for a free one. Raises OSError when taken.
        """
        if port == 0:
            port = _FIRST_PORT + self.next_number()
        if port in self.listeners:
            raise OSError(f"port {port} is in use")
        listener = SimListener(self, process, port, on_accept)
        self.listeners[port] = listener
        self.watch(process)
        return listener

    def dial(
        self,
        process: SimProcess,
        port: int,
        on_open: Callable[[End], None],
        on_error: Callable[[OSError], None],
    ) -> Dial:
        """Connects to the listener on `port`. One of the two callbacks is called in the current
        context, unless the returned attempt is cancelled before."""
        self.watch(process)
        return Dial(self, process, port, on_open, on_error)

    def create_server(
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str | None = None,
        port: int | None = None,
        **_: Any,
    ) -> StreamServer:
        """TCP, for the loop's method of that name."""
        return StreamServer(self, protocol_factory, host or "127.0.0.1", port or 0)

    async def create_connection(
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str = "",
        port: int = 0,
        **_: Any,
    ) -> tuple[StreamTransport, asyncio.BaseProtocol]:
        """TCP, for the loop's method of that name. Raises ConnectionRefusedError, or TimeoutError
        after a minute."""
        process = self.loop.current_process()
        mine = (process.name, _FIRST_PORT + self.next_number())
        done: asyncio.Future[StreamTransport] = self.loop.create_future()

        def opened(end: End) -> None:
            if done.done():
                end.abort()
            else:
                transport = StreamTransport(end, protocol_factory(), mine, (host, port))
                done.set_result(transport.open())

        def failed(exc: OSError) -> None:
            if not done.done():
                done.set_exception(exc)

        dial = self.dial(process, port, opened, failed)
        try:
            transport = await done
        except asyncio.CancelledError:
            dial.cancel()
            # It may have been opened in the same moment.
            if done.done() and not done.cancelled() and done.exception() is None:
                done.result().abort()
            raise
        return transport, transport.get_protocol()

    async def create_unix_connection(
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], path: str = "", **_: Any
    ) -> tuple[StreamTransport, asyncio.BaseProtocol]:
        """For the loop's method of that name. A partition counts as a listener that hangs."""
        if path not in self.unix_sockets:
            raise FileNotFoundError(f"no socket at {path}")
        return await self.create_connection(protocol_factory, path, self.unix_sockets[path])

    def next_number(self) -> int:
        """A number that nothing else in this network gets."""
        self._numbers += 1
        return self._numbers

    def call_at(self, when: float, function: Callable[..., Any], *args: Any) -> SimHandle:
        """Runs events that belong to no process: those of kernels and cables."""
        return self.loop.call_at(when, function, *args, context=self._nobody)

    def ends_of(self, process: SimProcess) -> list[End]:
        """The open connections of `process`."""
        return [end for end in self.ends if end.process is process]

    def watch(self, process: SimProcess) -> None:
        """Its connections break when it dies."""
        if process not in self._watched:
            self._watched[process] = None
            process.watchers.append(self._process_changed)

    def _process_changed(self, process: SimProcess, state: SimState) -> None:
        if state is SimState.DEAD:
            for listener in [x for x in self.listeners.values() if x.process is process]:
                listener.close()
            for end in self.ends_of(process):
                end.owner_died()
            del self._watched[process]
        self._reconsider()

    def _reconsider(self) -> None:
        for end in list(self.ends):
            end.reconsider()
