"""The network: delays and faults, partitions, streams that break, and what a death does."""

import asyncio
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from tests.simulation.loop.loop import VirtualLoop
from tests.simulation.network.channel import CUT_BREAKS_S, End
from tests.simulation.network.network import Network, Weather

PORT = 7000


class Pair:
    """A client and a server on two hosts, and one connection between them."""

    def __init__(self, loop: VirtualLoop):
        self.loop = loop
        self.network = Network(loop)
        self.client = loop.add_process("client")
        self.server = loop.add_process("server")
        self.got: dict[str, list[Any]] = {"client": [], "server": []}
        self.ends: dict[str, End] = {}
        self.server.run(self.network.listen, self.server, self._have("server"), PORT)

    async def connect(self) -> None:
        opened = self.loop.create_future()

        def make(end: End) -> None:
            self._have("client")(end)
            opened.set_result(None)

        self.client.run(self.network.dial, self.client, PORT, make, opened.set_exception)
        await opened

    def _have(self, side: str) -> Callable[[End], None]:
        def start(end: End) -> None:
            self.ends[side] = end
            got = self.got[side]
            end.start(got.append, lambda why: got.append(("closed", why)))

        return start


@pytest.fixture
async def pair(loop: VirtualLoop) -> Pair:
    pair = Pair(loop)
    await pair.connect()
    return pair


async def test_a_connection_keeps_order_whatever_the_delays(pair: Pair):
    pair.network.weather = Weather(spread_s=1.0, loss=0.5, duplicate=0.5, reorder=0.5)
    for i in range(100):
        pair.ends["client"].send(i)
        await asyncio.sleep(0.001)
    await asyncio.sleep(2)
    assert pair.got["server"] == list(range(100))


async def test_messages_get_lost_doubled_and_late_as_often_as_the_weather_says(network: Network):
    network.weather = Weather(loss=0.2, duplicate=0.1, reorder=0.2)
    got: list[int] = []
    for i in range(1000):
        network.as_the_weather_is(got.append, i)
        await asyncio.sleep(0.001)
    await asyncio.sleep(2)
    assert 150 < 1000 - len(set(got)) < 250
    assert 50 < len(got) - len(set(got)) < 130
    late = sum(b < a for a, b in itertools.pairwise(got))
    assert late > 50


async def test_delays_are_within_the_weathers_range_and_mostly_short(network: Network):
    network.weather = Weather(delay_s=0.001, spread_s=0.1)
    delays = [network.delay_s() for _ in range(2000)]
    assert min(delays) >= 0.001
    assert 0.09 < max(delays) <= 0.101
    assert sorted(delays)[1000] < 0.01


async def test_a_short_cut_delays_and_loses_nothing(pair: Pair):
    pair.ends["client"].send("before")
    pair.network.cut("server", "client")
    pair.ends["client"].send("during")
    await asyncio.sleep(1)
    assert pair.got["server"] == ["before"]
    pair.network.heal("client", "server")
    pair.ends["client"].send("after")
    await asyncio.sleep(1)
    assert pair.got["server"] == ["before", "during", "after"]


@pytest.mark.parametrize("how", ["cut", "isolate"])
async def test_a_long_cut_breaks_both_ends(pair: Pair, how: str):
    if how == "cut":
        pair.network.cut("client", "server")
    else:
        pair.network.isolate("client")
    pair.ends["client"].send("lost")
    await asyncio.sleep(CUT_BREAKS_S[0] - 0.1)
    assert pair.got == {"client": [], "server": []}
    await asyncio.sleep(CUT_BREAKS_S[1])
    broken = [("closed", "the peer does not answer")]
    assert pair.got == {"client": broken, "server": broken}
    pair.network.heal_all()
    await asyncio.sleep(5)
    assert pair.got["server"] == broken


async def test_the_hosts_of_others_are_not_cut_off(pair: Pair):
    pair.network.isolate("bystander")
    pair.network.cut("client", "bystander")
    pair.ends["client"].send("x")
    await asyncio.sleep(1)
    assert pair.got["server"] == ["x"]
    pair.network.rejoin("bystander")
    assert pair.network.is_cut("bystander", "client")
    assert not pair.network.is_cut("client", "client")


#: How the kernel of a killed process ends its connections.
ENDS = (("closed", ""), ("closed", "connection reset by peer"))


async def test_a_killed_peers_last_words_arrive_before_its_end(pair: Pair):
    pair.ends["server"].send("last words")
    pair.server.kill()
    pair.ends["client"].send("to nobody")
    await asyncio.sleep(1)
    words, end = pair.got["client"]
    assert words == "last words"
    assert end in ENDS
    assert pair.network.ends_of(pair.client) == []
    with pytest.raises(ConnectionRefusedError):
        await pair.connect()


async def test_a_peer_killed_behind_a_cut_is_noticed_when_it_ends(pair: Pair):
    pair.network.cut("client", "server")
    pair.server.kill()
    await asyncio.sleep(1)
    assert pair.got["client"] == []
    pair.network.heal_all()
    await asyncio.sleep(1)
    (end,) = pair.got["client"]
    assert end in ENDS


async def test_a_paused_peer_takes_connections_and_hears_later(pair: Pair):
    pair.server.pause()
    pair.ends["client"].send("x")
    await pair.connect()
    await asyncio.sleep(60)
    assert pair.got == {"client": [], "server": []}
    pair.server.resume()
    await asyncio.sleep(0.01)
    assert pair.got["server"] == ["x"]


async def test_who_pings_gives_up_a_paused_peer(pair: Pair):
    pair.ends["client"].silence_s = (2.0, 3.0)
    pair.server.pause()
    await asyncio.sleep(1.9)
    pair.server.resume()
    await asyncio.sleep(10)
    assert pair.got["client"] == []
    pair.server.pause()
    await asyncio.sleep(3.1)
    assert pair.got["client"] == [("closed", "the peer does not answer")]


async def test_an_orderly_close_comes_after_what_was_sent(pair: Pair):
    pair.ends["client"].send("x")
    pair.ends["client"].close()
    pair.ends["client"].send("too late")
    await asyncio.sleep(1)
    assert pair.got == {"client": [], "server": ["x", ("closed", "")]}


async def test_connecting_waits_for_the_end_of_a_cut(pair: Pair, loop: VirtualLoop):
    pair.network.cut("client", "server")
    connecting = asyncio.create_task(pair.connect())
    await asyncio.sleep(3)
    assert not connecting.done()
    pair.network.heal_all()
    await asyncio.sleep(2)
    assert connecting.done()
    pair.network.cut("client", "server")
    began = loop.time()
    with pytest.raises(TimeoutError):
        await pair.connect()
    assert loop.time() - began > 30


async def test_a_cancelled_attempt_leaves_no_connection(pair: Pair):
    for cancel_after_s in (0.0, 0.0001, 0.0003, 0.0005, 0.001):
        opened: list[End] = []
        dial = pair.client.run(pair.network.dial, pair.client, PORT, opened.append, pytest.fail)
        await asyncio.sleep(cancel_after_s)
        if not opened:
            dial.cancel()
            await asyncio.sleep(1)
            assert opened == []
            assert len(pair.network.ends_of(pair.client)) == 1
            assert len(pair.network.ends_of(pair.server)) == 1
        for end in opened:
            end.close()
            await asyncio.sleep(1)


# TCP


class Stream(asyncio.Protocol):
    """Keeps what comes, in one list with what happens."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.seen.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.seen.append(exc and type(exc))

    def pause_writing(self) -> None:
        self.seen.append("pause")

    def resume_writing(self) -> None:
        self.seen.append("resume")


class Streams:
    def __init__(self, loop: VirtualLoop):
        self.network = Network(loop)
        self.near, self.far = loop.add_process("near"), loop.add_process("far")
        self.client, self.server = Stream(), Stream()

    async def open(self, loop: VirtualLoop) -> asyncio.AbstractServer:
        server = await self.far.spawn(loop.create_server(lambda: self.server, "127.0.0.1", 0))
        host, port = server.sockets[0].getsockname()
        await self.near.spawn(loop.create_connection(lambda: self.client, host, port))
        return server


@pytest.fixture
async def streams(loop: VirtualLoop) -> Streams:
    streams = Streams(loop)
    await streams.open(loop)
    return streams


async def test_bytes_pass_and_a_close_ends_both_sides(streams: Streams):
    streams.client.transport.write(b"question")
    streams.client.transport.write(b"?")
    await asyncio.sleep(1)
    streams.server.transport.write(b"answer")
    streams.server.transport.close()
    assert streams.server.transport.is_closing()
    await asyncio.sleep(1)
    assert streams.server.seen == [b"question", b"?", None]
    assert streams.client.seen == [b"answer", None]


async def test_a_closed_connection_is_freed_without_the_garbage_collector(streams: Streams):
    transports = [weakref.ref(side.transport) for side in (streams.client, streams.server)]
    processes = (streams.near, streams.far)
    ends = [weakref.ref(end) for process in processes for end in streams.network.ends_of(process)]
    assert len(ends) == 2
    streams.client.transport.write(b"question")
    await asyncio.sleep(1)
    streams.server.transport.close()
    await asyncio.sleep(1)
    streams.client.transport = streams.server.transport = None
    assert [each() for each in (*transports, *ends)] == [None] * 4


async def test_a_reader_that_is_stopped_fills_the_writers_buffer(streams: Streams):
    streams.far.pause()
    write = streams.near.run
    for _ in range(5):
        write(streams.client.transport.write, bytes(100 << 10))
    unsent = streams.client.transport.get_write_buffer_size()
    assert 0 < unsent < 500 << 10
    assert streams.client.seen == ["pause"]
    write(streams.client.transport.close)
    await asyncio.sleep(1)
    assert streams.client.seen == ["pause"]
    streams.far.resume()
    await asyncio.sleep(1)
    assert streams.client.seen == ["pause", None]
    assert [len(data) for data in streams.server.seen[:-1]] == [100 << 10] * 5
    assert streams.server.seen[-1] is None


async def test_writing_goes_on_when_the_peer_reads_again(streams: Streams):
    streams.far.pause()
    streams.near.run(streams.client.transport.write, bytes(1 << 20))
    streams.far.resume()
    await asyncio.sleep(1)
    assert streams.client.seen == ["pause", "resume"]
    assert streams.client.transport.get_write_buffer_size() == 0


async def test_an_abort_and_a_death_reach_the_peer(streams: Streams, loop: VirtualLoop):
    streams.client.transport.abort()
    await asyncio.sleep(1)
    assert streams.client.seen == [None]
    assert streams.server.seen == [ConnectionResetError]
    again = Streams.__new__(Streams)
    again.network, again.near, again.far = streams.network, streams.near, streams.far
    again.client, again.server = Stream(), Stream()
    await again.open(loop)
    again.far.kill()
    await asyncio.sleep(1)
    assert again.client.seen in ([ConnectionResetError], [None])
    assert again.server.seen == []


async def test_a_closed_server_refuses_and_keeps_its_connections(loop: VirtualLoop):
    streams = Streams(loop)
    server = await streams.open(loop)
    address = server.sockets[0].getsockname()
    server.close()
    with pytest.raises(ConnectionRefusedError):
        await loop.create_connection(Stream, *address)
    streams.client.transport.write(b"still here")
    await asyncio.sleep(1)
    assert streams.server.seen == [b"still here"]
